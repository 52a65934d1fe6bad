// Sends a request, with the API key if the server needs one. Reads the reply as it arrives, and measures times.

import { $ } from "./dom.js";

let key = ""; // It is only in the memory of this page.

export const useKey = (text) => (key = text.trim());

// The header as the page shows it, without the key.
export const keyHeader = () => (key ? { authorization: "Bearer KEY" } : {});

// Calls `fetch` with the key. If the server refuses the key or needs one, the page asks for a key.
export async function call(url, options) {
	const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
	const reply = await fetch(url, { ...options, headers });
	$("#key").hidden = reply.status !== 401;
	return reply;
}

// Returns a percentile by nearest rank: at least this share of the values is not larger. Null if there are no values.
export function percentile(values, share) {
	const sorted = [...values].sort((a, b) => a - b);
	return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] ?? null;
}

// Only this much of a reply is kept, because a browser cannot show more. The bytes after it are only counted.
const KEPT_BYTES = 8_000_000;

// What a contract's reader has found in the reply so far.
export class Answer {
	constructor(streamed) {
		this.streamed = streamed;
		this.text = "";
		this.tokens = []; // { text, logprob, tops, at, aside }
		this.reason = "";
		this.counted = null;
		this.numbers = null; // Vectors, ranks or classes, if the model generates no text.
		this.prompt = null; // The number of the prompt's tokens.
		this.error = "";
		this.now = 0;
	}

	// `aside` is true if the text is not a generated token, such as the prompt before the answer.
	token(text, logprob, tops = [], aside = false) {
		this.text += text;
		this.tokens.push({ text, logprob: logprob ?? null, tops, at: this.now, aside });
	}

	whole(text) {
		this.token(text, null, [], true);
	}

	finish(reason) {
		this.reason = String(reason);
	}

	count(tokens) {
		this.counted = tokens;
	}

	fail(message) {
		this.error = String(message);
	}
}

// Splits bytes into records. A part of the bytes may end inside a record or a character.
class Records {
	constructor(kind, take) {
		this.kind = kind;
		this.take = take;
		this.decoder = new TextDecoder();
		this.rest = "";
	}

	push(bytes, last = false) {
		this.rest += this.decoder.decode(bytes, { stream: !last });
		if (this.kind === "whole" && !last) return;
		if (this.kind === "whole") return this.record(this.rest.trim());
		const lines = this.rest.split("\n");
		this.rest = last ? "" : lines.pop();
		for (const line of lines) this.line(line.replace(/\r$/, ""));
	}

	line(line) {
		if (line.startsWith(":")) return; // a comment
		this.record(line.startsWith("data:") ? line.slice(5).trim() : line.trim());
	}

	record(text) {
		if (!text || text === "[DONE]" || !/^[[{]/.test(text)) return;
		try {
			this.take(JSON.parse(text));
		} catch {
			// This text is not a record. The reply's bytes show it.
		}
	}
}

// Reads AWS's event stream, and passes on the payloads of PayloadPart events and the exceptions.
class EventStream {
	constructor(payload, exception) {
		this.rest = new Uint8Array();
		this.payload = payload;
		this.exception = exception;
	}

	push(bytes) {
		const all = new Uint8Array(this.rest.length + bytes.length);
		all.set(this.rest);
		all.set(bytes, this.rest.length);
		let start = 0;
		while (all.length - start >= 16) {
			const view = new DataView(all.buffer, start);
			const length = view.getUint32(0);
			if (length < 16 || all.length - start < length) break;
			const headersEnd = 12 + view.getUint32(4);
			const headers = readHeaders(all.subarray(start + 12, start + headersEnd));
			const payload = all.subarray(start + headersEnd, start + length - 4);
			if (headers[":message-type"] === "event") this.payload(payload);
			else this.exception(`${headers[":exception-type"] ?? "error"}: ${new TextDecoder().decode(payload)}`);
			start += length;
		}
		this.rest = all.slice(start);
	}
}

function readHeaders(bytes) {
	const decoder = new TextDecoder();
	const found = {};
	for (let at = 0; at < bytes.length;) {
		const name = decoder.decode(bytes.subarray(at + 1, (at += 1 + bytes[at])));
		const size = (bytes[at + 1] << 8) | bytes[at + 2]; // all headers of this API are strings
		found[name] = decoder.decode(bytes.subarray(at + 3, (at += 3 + size)));
	}
	return found;
}

// A request that runs, or has ended. `onchange` is called whenever there is something new.
export class Exchange {
	constructor({ url, path, headers, body, format, read }, onchange) {
		Object.assign(this, { url, path, headers, body, format, onchange });
		this.reader = read;
		this.state = "waiting"; // then "streaming", then "done", "stopped" or "failed"
		this.status = 0;
		this.statusText = "";
		this.replyHeaders = [];
		this.chunks = []; // { at, bytes }
		this.size = 0;
		this.firstByte = null;
		this.total = null;
		this.failure = "";
		this.document = null; // The body of an error, if it is JSON.
		this.answer = new Answer(Boolean(format.stream));
		this.abort = new AbortController();
	}

	get running() {
		return this.state === "waiting" || this.state === "streaming";
	}

	stop() {
		if (this.running) this.abort.abort();
	}

	async run() {
		this.started = performance.now();
		try {
			const reply = await call(this.url, {
				method: "POST",
				headers: this.headers,
				body: this.body,
				signal: this.abort.signal,
			});
			this.status = reply.status;
			this.statusText = reply.statusText;
			this.replyHeaders = [...reply.headers];
			this.state = "streaming";
			this.onchange(this);
			await this.#read(reply);
			this.state = reply.ok && !this.answer.error ? "done" : "failed";
		} catch (error) {
			if (this.abort.signal.aborted) {
				this.state = "stopped";
			} else {
				this.state = "failed";
				this.failure = this.status
					? "The connection broke off in the middle of the reply."
					: "The server cannot be reached.";
			}
		}
		this.total = performance.now() - this.started;
		if (this.state === "done" && this.format.stream && !this.answer.tokens.length) {
			this.failure = "The stream ended without any text.";
		}
		this.onchange(this);
		return this;
	}

	async #read(reply) {
		const type = reply.headers.get("content-type") ?? "";
		const events = type.includes("vnd.amazon.eventstream");
		const whole = type.startsWith("application/json") || !reply.ok;
		const streamed = /event-stream|jsonlines/.test(type) || events;
		this.answer.streamed = streamed || (Boolean(this.format.stream) && !whole);
		const take = (record) => {
			if (!reply.ok) this.document = record;
			this.reader(record, this.answer);
			if (this.answer.error) this.document = record;
		};
		const records = new Records(this.answer.streamed ? "lines" : "whole", take);
		const stream = new EventStream(
			(payload) => records.push(payload),
			(message) => this.answer.fail(message),
		);
		const source = reply.body.getReader();
		for (;;) {
			const { done, value } = await source.read();
			if (done) break;
			const at = performance.now() - this.started;
			this.firstByte ??= at;
			this.size += value.length;
			if (this.size <= KEPT_BYTES) this.chunks.push({ at, bytes: value });
			this.answer.now = at;
			if (events) stream.push(value);
			else records.push(value);
			this.onchange(this);
		}
		records.push(new Uint8Array(), true);
		if (!reply.ok && !this.answer.error)
			this.answer.fail(this.text().trim() || `${reply.status} ${reply.statusText}`.trim());
	}

	// Returns the reply's bytes as text, mainly for errors.
	text() {
		const decoder = new TextDecoder();
		return this.chunks.map(({ bytes }) => decoder.decode(bytes, { stream: true })).join("") + decoder.decode();
	}

	// Returns the figures. Times are in milliseconds. Gaps are the times between the arrivals of tokens. Several tokens may
	// arrive together.
	figures() {
		const times = this.answer.tokens.filter((token) => !token.aside).map((token) => token.at);
		const gaps = times.slice(1).map((time, place) => time - times[place]);
		const streamed = this.answer.streamed && times.length > 1;
		const tokens = this.answer.counted ?? times.length;
		const seconds = streamed ? (times.at(-1) - times[0]) / 1000 : (this.total ?? 0) / 1000;
		return {
			firstByte: this.firstByte,
			firstToken: this.answer.streamed ? (times[0] ?? null) : null,
			tokens: tokens || null,
			prompt: this.answer.prompt,
			rate: seconds > 0 && tokens > 1 ? (streamed ? times.length - 1 : tokens) / seconds : null,
			median: this.answer.streamed ? percentile(gaps, 0.5) : null,
			slow: this.answer.streamed ? percentile(gaps, 0.99) : null,
			total: this.total ?? performance.now() - this.started,
			gaps: this.answer.streamed ? gaps : [],
		};
	}
}
