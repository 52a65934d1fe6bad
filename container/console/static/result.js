// What is shown of one exchange: text, figures, bytes, and the same request as code.

import { $, bytesText, copy, fromTemplate, h, milliseconds, rate, shortened } from "./dom.js";
import { curl, python } from "./code.js";
import { guilty } from "./contracts.js";

const BARS = 150;
const BLOCK_CHARACTERS = 8192;
const OVERLOADED = new Set([408, 429]);
const HEX_BYTES = 65536;

export class Result {
	constructor(title) {
		this.element = fromTemplate("result-template");
		const part = (selector) => $(selector, this.element);
		this.parts = {
			title: part(".result-title"),
			phase: part(".phase"),
			figures: part(".figures"),
			gaps: part(".gaps"),
			error: part(".error"),
			legend: part(".legend"),
			text: part(".text"),
			request: part(".request"),
			requestSize: part(".request-size"),
			reply: part(".reply"),
			replySize: part(".reply-size"),
			code: part(".code"),
			codeHint: part(".code-hint"),
		};
		for (let share = 0; share <= 1; share += 0.125) part(".scale").append(shaded(share));
		this.parts.title.textContent = title;
		this.label = title;
		this.hex = false;
		this.language = "curl";
		this.#toggle(".as-text", ".as-hex", (second) => {
			this.hex = second;
			this.#reply(true);
		});
		this.#toggle(".as-curl", ".as-python", (second) => {
			this.language = second ? "python" : "curl";
			this.#code();
		});
		const button = part(".copy");
		button.addEventListener("click", async () => {
			const done = await copy(this.copied, this.parts.code);
			button.textContent = done ? "Copied" : "Selected: press Ctrl+C";
			setTimeout(() => (button.textContent = "Copy"), 2000);
		});
	}

	#toggle(first, second, choose) {
		const buttons = [first, second].map((selector) => $(selector, this.element));
		buttons.forEach((button, place) =>
			button.addEventListener("click", () => {
				buttons.forEach((other, at) => other.setAttribute("aria-pressed", String(at === place)));
				choose(place === 1);
			}),
		);
	}

	// Shows a request that has not been sent.
	prepare(request) {
		this.request = request;
		this.parts.title.textContent = `${this.label}${(this.sent ?? request)?.title ?? "nothing to send"}`;
		if (this.exchange?.running) return;
		this.#code();
		if (!this.exchange) this.#requestBytes(request);
	}

	begin(exchange, request) {
		this.exchange = exchange;
		this.request = request;
		this.sent = request;
		this.drawn = { tokens: 0, chunks: 0, gaps: 0 };
		this.decoder = new TextDecoder();
		this.parts.title.textContent = `${this.label}${request.title}`;
		this.parts.text.replaceChildren();
		this.parts.text.ariaLabel = request.contract.label ?? "Generated text";
		this.parts.reply.replaceChildren();
		this.parts.error.hidden = true;
		this.parts.legend.hidden = true;
		this.parts.gaps.hidden = true;
		this.#requestBytes(request);
		this.#code();
		this.draw();
	}

	// Draws what is new; once for each frame, however many tokens have come.
	draw() {
		const { exchange, parts } = this;
		if (!exchange) return;
		const ended = !exchange.running;
		parts.phase.textContent = phaseText(exchange);
		parts.phase.dataset.state = exchange.state;
		this.#text(ended);
		this.#reply(false);
		const now = performance.now();
		if (ended || now - this.drawn.gaps > 200) {
			this.drawn.gaps = now;
			const figures = exchange.figures();
			const { reason } = exchange.answer;
			const details = ended && exchange.answer.tokens.length && this.sent.names.includes("details");
			drawFigures(parts.figures, figures, this.sent.contract, reason || (details ? "– (ask for details)" : "–"));
			drawGaps(parts.gaps, figures);
		}
		if (ended) this.#problem();
	}

	// Names of the sent request's fields that its error is about; null where there is none.
	get guilty() {
		const { exchange, sent } = this;
		if (!exchange?.answer.error || OVERLOADED.has(exchange.status) || exchange.status >= 500) return null;
		return guilty(exchange.answer.error, exchange.document, sent.names);
	}

	#text(ended) {
		const { numbers, tokens } = this.exchange.answer;
		const { text, legend } = this.parts;
		if (numbers) {
			const { contract } = this.sent;
			if (ended)
				text.replaceChildren(
					h("p", { class: "verdict" }, contract.said(numbers, this.sent)),
					contract.draw(numbers, this.sent),
				);
			return;
		}
		const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
		let plain = "";
		const fragment = document.createDocumentFragment();
		for (; this.drawn.tokens < tokens.length; this.drawn.tokens += 1) {
			const token = tokens[this.drawn.tokens];
			if (token.logprob == null) {
				plain += token.text;
				continue;
			}
			if (plain) fragment.append(plain);
			plain = "";
			const probability = Math.exp(token.logprob);
			const others = token.tops.map(([other, logprob]) => `${JSON.stringify(other)} ${percent(Math.exp(logprob))}`);
			const title = [
				`${JSON.stringify(token.text)} ${percent(probability)}, log ${token.logprob.toFixed(3)}`,
				...others,
			].join("\n");
			fragment.append(shaded(probability, { title }, token.text));
			legend.hidden = false;
		}
		if (plain) fragment.append(plain);
		if (fragment.childNodes.length) text.append(fragment);
		if (ended && !tokens.length && this.exchange.state === "done" && !this.exchange.failure) {
			text.replaceChildren(
				h(
					"span",
					{ class: "hint" },
					!this.exchange.size
						? "The reply is empty."
						: this.sent.contract.draw
							? "No numbers that the console reads: see the reply."
							: "No text that this contract has: see the reply.",
				),
			);
		}
		if (atEnd && text.scrollHeight > text.clientHeight) text.scrollTop = text.scrollHeight;
	}

	#requestBytes(request) {
		const { request: pre, requestSize } = this.parts;
		if (!request) {
			pre.replaceChildren();
			requestSize.textContent = "";
			return;
		}
		const headers = Object.entries(request.headers).map(([name, value]) => `${name}: ${value}`);
		const head = h("span", { class: "head" }, `POST ${new URL(request.url).pathname}\n${headers.join("\n")}\n\n`);
		pre.replaceChildren(head, shortened(request.body));
		requestSize.textContent = bytesText(new TextEncoder().encode(request.body).length);
	}

	// The reply's bytes so far: blocks of text that the browser lays out when they are seen, or a hex dump.
	#reply(anew) {
		const { exchange, parts } = this;
		if (!exchange) return;
		const pre = parts.reply;
		if (anew) {
			pre.replaceChildren();
			this.drawn.chunks = 0;
			this.decoder = new TextDecoder();
			this.block = null;
		}
		if (exchange.status && !pre.childNodes.length) {
			const headers = exchange.replyHeaders.map(([name, value]) => `${name}: ${value}`).join("\n");
			pre.append(h("span", { class: "head" }, `${exchange.status} ${exchange.statusText}`.trim() + `\n${headers}\n\n`));
			this.block = null;
		}
		const count = exchange.chunks.length;
		if (this.hex) {
			if (count !== this.drawn.chunks || anew) {
				this.block?.remove();
				this.block = h("span", {}, hexDump(exchange.chunks));
				pre.append(this.block);
			}
		} else {
			let text = "";
			for (let place = this.drawn.chunks; place < count; place += 1)
				text += this.decoder.decode(exchange.chunks[place].bytes, { stream: true });
			while (text) {
				if (!this.block) {
					pre.append((this.block = h("div", { class: "block" })));
					this.filled = 0;
				}
				// A block is a line of its own: it ends where a line does.
				const room = Math.max(0, BLOCK_CHARACTERS - this.filled);
				const end = text.length <= room ? text.length : text.indexOf("\n", room) + 1 || text.length;
				this.block.append(text.slice(0, end));
				this.filled += end;
				if (end < text.length) this.block = null;
				text = text.slice(end);
			}
		}
		this.drawn.chunks = count;
		const cut =
			exchange.chunks.reduce((sum, { bytes }) => sum + bytes.length, 0) < exchange.size
				? ", the first 8 MB are shown"
				: "";
		parts.replySize.textContent = `${bytesText(exchange.size)} in ${count} ${count === 1 ? "part" : "parts"}${cut}`;
	}

	#code() {
		const { code } = this.parts;
		const request = this.exchange?.running ? this.sent : this.request;
		const changed = this.exchange && request && (request.body !== this.sent.body || request.url !== this.sent.url);
		this.parts.codeHint.textContent = changed ? "with what was changed since" : "";
		this.copied = request ? (this.language === "curl" ? curl(request) : python(request)) : "";
		code.textContent = shortened(this.copied);
	}

	#problem() {
		const { exchange, parts } = this;
		const said = exchange.answer.error;
		parts.error.hidden = !said && !exchange.failure;
		if (parts.error.hidden) return;
		$(".error-title", parts.error).textContent = said
			? `${exchange.status} ${exchange.statusText}`.trim()
			: exchange.failure;
		const body = $(".error-body", parts.error);
		body.hidden = !said;
		const text = exchange.document ? JSON.stringify(exchange.document, null, 2) : said;
		const name = this.guilty;
		const place = name ? text.search(new RegExp(`(?<!\\w)${name}(?!\\w)`)) : -1;
		body.replaceChildren(
			...(place < 0 ? [text] : [text.slice(0, place), h("mark", {}, name), text.slice(place + name.length)]),
		);
	}
}

// The less probable a token, the darker.
function shaded(probability, attributes, ...text) {
	const span = h("span", { class: "token", ...attributes }, ...text);
	span.style.setProperty("--share", `${Math.round((1 - probability) * 100)}%`);
	return span;
}

function phaseText(exchange) {
	if (exchange.state === "done") return exchange.answer.reason ? `done: ${exchange.answer.reason}` : "done";
	if (exchange.state === "failed" && exchange.status && exchange.status !== 200) return `${exchange.status}`;
	return exchange.state;
}

function percent(share) {
	return `${(share * 100).toFixed(share < 0.1 ? 2 : 1)} %`;
}

function drawFigures(list, figures, contract, reason) {
	const ofText = [
		["First token", milliseconds(figures.firstToken)],
		["Tokens", figures.tokens ?? "–"],
		["Tokens/s", rate(figures.rate)],
		["Gap, median", milliseconds(figures.median)],
		["Gap, p99", milliseconds(figures.slow)],
	];
	const rows = [
		["First byte", milliseconds(figures.firstByte)],
		...(contract.draw ? [["Prompt tokens", figures.prompt ?? "–"]] : ofText),
		["Total", milliseconds(figures.total)],
		...(contract.draw ? [] : [["Finish reason", reason]]),
	];
	list.replaceChildren(...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
}

// A bar for each gap; where there are more than bars, the longest of its share.
function drawGaps(figure, { gaps, median }) {
	figure.hidden = gaps.length < 2;
	if (figure.hidden) return;
	const size = Math.max(1, Math.ceil(gaps.length / BARS));
	const bars = [];
	for (let at = 0; at < gaps.length; at += size) bars.push(Math.max(...gaps.slice(at, at + size)));
	const most = Math.max(...bars, 0.001);
	const width = 300 / bars.length;
	const height = (gap) => (gap / most) * 46;
	const path = bars.map(
		(gap, place) =>
			`M${(place * width).toFixed(2)} 48v${(-Math.max(0.5, height(gap))).toFixed(2)}h${(width * 0.8).toFixed(2)}V48z`,
	);
	$(".bars", figure).setAttribute("d", path.join(""));
	$(".median", figure).setAttribute("d", `M0 ${(48 - height(median)).toFixed(2)}H300`);
	const each = size > 1 ? `, each bar the longest of ${size}` : "";
	const text = `Gaps between tokens: up to ${milliseconds(most)}, median ${milliseconds(median)}${each}`;
	$("figcaption", figure).textContent = text;
	$("svg", figure).setAttribute("aria-label", text);
}

function hexDump(chunks) {
	const lines = [];
	let shown = 0;
	for (const { at, bytes } of chunks) {
		if (shown >= HEX_BYTES) {
			lines.push(`… more than ${bytesText(HEX_BYTES)}`);
			break;
		}
		lines.push(`+${milliseconds(at)}  ${bytesText(bytes.length)}`);
		const part = bytes.subarray(0, HEX_BYTES - shown);
		for (let start = 0; start < part.length; start += 16) {
			const row = [...part.subarray(start, start + 16)];
			const hex = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
			const text = row.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
			lines.push(`${hex.padEnd(47)}  ${text}`);
		}
		shown += part.length;
	}
	return lines.join("\n");
}
