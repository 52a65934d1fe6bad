// A text whose tokens are shaded by their probabilities. A pointer, a tap or the arrow keys choose a token, and its
// alternatives are shown.

import { $, bar, h } from "./dom.js";

const HINT = "Point at a token or tap it, or step through the text with the arrow keys.";
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

const percent = (share) => `${(share * 100).toFixed(share < 0.1 ? 2 : 1)} %`;

// Returns a shaded text. The less probable the token is, the darker is the shade.
export function shaded(probability, ...text) {
	const span = h("span", { class: "token" }, ...text);
	span.style.setProperty("--share", `${Math.round((1 - probability) * 100)}%`);
	return span;
}

export class Tokens {
	constructor(text, panel) {
		this.text = text;
		this.panel = panel;
		this.detail = $(".token-detail", panel);
		for (let share = 0; share <= 1; share += 0.125) $(".scale", panel).append(shaded(share));
		for (const kind of ["pointerover", "click"])
			text.addEventListener(kind, ({ target }) => this.#choose(this.spans.indexOf(target.closest(".token"))));
		text.addEventListener("keydown", (event) => {
			const step = STEPS[event.key];
			if (!step || !this.spans.length) return;
			event.preventDefault();
			this.#choose(Math.min(this.spans.length - 1, Math.max(0, this.chosen + step)));
			this.spans[this.chosen].scrollIntoView({ block: "nearest" });
		});
		this.clear();
	}

	clear() {
		this.spans = [];
		this.tokens = [];
		this.chosen = -1;
		this.text.replaceChildren();
		this.panel.hidden = true;
		this.detail.replaceChildren(h("p", { class: "hint" }, HINT));
	}

	// Adds tokens to the text. A token without a log probability is added as plain text.
	add(tokens) {
		const fragment = document.createDocumentFragment();
		let plain = "";
		for (const token of tokens) {
			if (token.logprob == null) {
				plain += token.text;
				continue;
			}
			const span = shaded(Math.exp(token.logprob), token.text);
			if (plain) fragment.append(plain);
			fragment.append(span);
			plain = "";
			this.spans.push(span);
			this.tokens.push(token);
			this.panel.hidden = false;
		}
		if (plain) fragment.append(plain);
		this.text.append(fragment);
	}

	#choose(place) {
		if (place < 0 || place === this.chosen) return;
		this.spans[this.chosen]?.classList.remove("chosen");
		this.spans[place].classList.add("chosen");
		this.chosen = place;
		const { text, logprob, tops } = this.tokens[place];
		const rows = [[text, logprob], ...tops].map(([one, log]) => {
			const probability = Math.exp(log);
			return h("li", {}, h("code", {}, JSON.stringify(one)), bar(probability), h("span", {}, percent(probability)));
		});
		const said = `Token ${place + 1} of ${this.spans.length}, log probability ${logprob.toFixed(3)}`;
		this.detail.replaceChildren(h("p", { class: "hint" }, said), h("ol", {}, ...rows));
	}
}
