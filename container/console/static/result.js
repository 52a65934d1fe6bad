// Shows one exchange: its text, its figures, its bytes, and its request as code.

import { $, bytesText, copy, fromTemplate, h, milliseconds, rate, shortened, table } from "./dom.js";
import { curl, python } from "./code.js";
import { guilty } from "./contracts.js";
import { percentile } from "./exchange.js";
import { Tokens } from "./tokens.js";

const BARS = 150;
const BLOCK_CHARACTERS = 8192;
const OVERLOADED = new Set([408, 429]);
const HEX_BYTES = 65536;
const MOST_SAID = 2000; // The maximum number of characters that are shown of an error. The reply has all characters.

export class Result {
	constructor(title) {
		this.element = fromTemplate("result-template");
		const part = (selector) => $(selector, this.element);
		this.parts = { title: part(".result-title"), codeHint: part(".code-hint") };
		for (const name of ["request", "reply"]) this.parts[`${name}Size`] = part(`.${name}-size`);
		for (const name of ["phase", "figures", "gaps", "calls", "error", "text", "request", "reply", "code"])
			this.parts[name] = part(`.${name}`);
		this.tokens = new Tokens(this.parts.text, part(".probabilities"));
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

	// Shows an exchange that begins. `call` is its number in a series of equal calls.
	begin(exchange, request, call = 1) {
		this.exchange = exchange;
		this.request = request;
		this.sent = request;
		if (call === 1) this.figures = [];
		this.drawn = { tokens: 0, chunks: 0, gaps: 0 };
		this.decoder = new TextDecoder();
		this.parts.title.textContent = `${this.label}${request.title}`;
		this.tokens.clear();
		this.parts.text.hidden = false;
		this.parts.text.ariaLabel = request.contract.label ?? "Generated text";
		this.parts.reply.replaceChildren();
		for (const name of ["error", "gaps"]) this.parts[name].hidden = true;
		if (call === 1) this.parts.calls.hidden = true;
		this.#requestBytes(request);
		this.#code();
		this.draw();
	}

	// Draws what is new. This runs once for each frame, even if many tokens have arrived.
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

	// Returns the field of the sent request that the error is about, or null if there is none.
	get guilty() {
		const { exchange, sent } = this;
		if (!exchange?.answer.error || OVERLOADED.has(exchange.status) || exchange.status >= 500) return null;
		return guilty(exchange.answer.error, exchange.document, sent.names);
	}

	// Adds the figures of the exchange to those of the series, and shows the percentiles of all.
	count(calls) {
		this.figures.push(this.exchange.figures());
		const { contract } = this.sent;
		const rows = FIGURES.filter(([, name]) => !contract.draw || ["firstByte", "total"].includes(name)).map(
			([title, name, show]) => {
				const values = this.figures.map((one) => one[name]).filter((value) => value != null);
				return [title, ...[0.5, 0.95].map((share) => show(percentile(values, share)))];
			},
		);
		const { calls: element } = this.parts;
		const title = `Calls ${this.figures.length} of ${calls}`;
		element.hidden = calls < 2;
		element.replaceChildren(table([title, "p50", "p95"], rows, { "aria-label": "Percentiles of the calls" }));
	}

	#text(ended) {
		const { numbers, tokens } = this.exchange.answer;
		const { text } = this.parts;
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
		if (this.drawn.tokens < tokens.length) this.tokens.add(tokens.slice(this.drawn.tokens));
		this.drawn.tokens = tokens.length;
		if (ended && !tokens.length && this.exchange.state === "done" && !this.exchange.failure) {
			const said = !this.exchange.size
				? "The reply is empty."
				: this.sent.contract.draw
					? "No numbers that the console reads: see the reply."
					: "No text that this contract has: see the reply.";
			text.replaceChildren(h("span", { class: "hint" }, said));
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

	// Shows the reply's bytes so far as a hex dump or as text. The text is in blocks, and the browser lays out only the
	// blocks that are visible.
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
				// The page begins a new line after a block, so a block ends where a line of the text ends.
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
		parts.text.hidden = !exchange.answer.tokens.length;
		const [title, message, body] = [...parts.error.children];
		title.textContent = said ? `${exchange.status} ${exchange.statusText}`.trim() : exchange.failure;
		message.textContent = cut(said);
		body.hidden = !said;
		const text = cut(exchange.document ? JSON.stringify(exchange.document, null, 2) : said);
		const name = this.guilty;
		const place = name ? text.search(new RegExp(`(?<!\\w)${name}(?!\\w)`)) : -1;
		body.replaceChildren(
			...(place < 0 ? [text] : [text.slice(0, place), h("mark", {}, name), text.slice(place + name.length)]),
		);
		message.hidden = !said || text === message.textContent;
	}
}

const cut = (text) => (text.length > MOST_SAID ? `${text.slice(0, MOST_SAID)}… (all of it is in the reply)` : text);

function phaseText(exchange) {
	if (exchange.state === "done") return exchange.answer.reason ? `done: ${exchange.answer.reason}` : "done";
	if (exchange.state === "failed" && exchange.status && exchange.status !== 200) return `${exchange.status}`;
	return exchange.state;
}

// The figures of an exchange: their titles, their names, and how they are shown.
export const FIGURES = [
	["First byte", "firstByte", milliseconds],
	["First token", "firstToken", milliseconds],
	["Tokens", "tokens", (value) => value ?? "–"],
	["Tokens/s", "rate", rate],
	["Gap, median", "median", milliseconds],
	["Gap, p99", "slow", milliseconds],
	["Total", "total", milliseconds],
];

function drawFigures(list, figures, contract, reason) {
	const all = FIGURES.map(([title, name, show]) => [title, show(figures[name])]);
	const rows = contract.draw
		? [all[0], ["Prompt tokens", figures.prompt ?? "–"], all.at(-1)]
		: [...all, ["Finish reason", reason]];
	list.replaceChildren(...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
}

// Draws a bar for each gap. If there are too many gaps, each bar shows the longest of several gaps.
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
