// Keeps the sent prompts and their answers in this browser's storage, without keys and images.

import { $, h, milliseconds } from "./dom.js";

const PLACE = "slipway.history";
const MOST_ENTRIES = 50;
const MOST_CHARACTERS = 25_000; // The limit for a request, and for an answer.
const MOST_OF_ALL = 1_000_000; // The limit for all entries together, in characters.
// Data URLs, such as images in a body that was written by hand.
const DATA = /data:(?:[\w.+-]+\\*\/[^"'\s,]*|;base64),[^"'\s]*/gi;

export class History {
	// `onuse({ form, prompt })` puts a request into the form.
	constructor(onuse) {
		this.onuse = onuse;
		this.entries = [];
		this.#read();
		$("#clear-history").addEventListener("click", () => this.#keep([]));
		this.draw();
	}

	// Adds a sent request at the beginning of the list. `form` and `prompt` are the data that the form restores.
	add(form, prompt, { contract, format, model }, exchange) {
		const { tokens, firstToken, total } = exchange.figures();
		const { text, numbers, error } = exchange.answer;
		const answer = numbers ? JSON.stringify(numbers) : error || exchange.failure || text;
		const request = JSON.stringify([form, prompt]);
		const entry = {
			at: Date.now(),
			title: `${contract.name}, ${format.name}`,
			model: model.name,
			asked: shortened((form.written ?? prompt.asked).replaceAll(DATA, "data:…")),
			// If a request is too long or has images, it is not kept as a whole, and the form cannot restore it.
			again: request.length > MOST_CHARACTERS || request.search(DATA) >= 0 ? null : { form, prompt },
			state: exchange.state,
			figures: [tokens, firstToken, total],
			answer: shortened(answer),
		};
		this.#read();
		this.#keep([entry, ...this.entries].slice(0, MOST_ENTRIES));
	}

	// Reads the entries from this browser's storage, because another page may have changed them.
	#read() {
		try {
			const kept = JSON.parse(localStorage.getItem(PLACE));
			this.entries = Array.isArray(kept) ? kept.filter(isEntry) : [];
		} catch {
			// The storage is off, or holds something else.
		}
	}

	// Stores the entries. The oldest entries are dropped if all entries together are too long.
	#keep(entries) {
		let text = JSON.stringify(entries);
		while (text.length > MOST_OF_ALL) {
			entries = entries.slice(0, -1);
			text = JSON.stringify(entries);
		}
		this.entries = entries;
		try {
			localStorage.setItem(PLACE, text);
		} catch {
			// The storage is off, so the entries are lost when the page is reloaded.
		}
		this.draw();
	}

	draw() {
		const { length } = this.entries;
		$("#history-hint").textContent = length
			? `The last ${MOST_ENTRIES} requests, without keys and images. They are in this browser only.`
			: "Nothing was sent yet. Requests that you send are kept here, in this browser only.";
		$("#clear-history").hidden = !length;
		$("#history-entries").replaceChildren(...this.entries.map((entry) => this.#card(entry)));
	}

	#card(entry) {
		const [tokens, first, total] = entry.figures;
		const figures = [
			tokens ? `${tokens} tokens` : "",
			first ? `first token ${milliseconds(first)}` : "",
			`total ${milliseconds(total)}`,
		];
		const time = new Date(entry.at);
		const title = h("h3", {}, entry.title);
		return h(
			"li",
			{ class: "card entry" },
			h(
				"div",
				{ class: "row" },
				title,
				h("time", { datetime: time.toISOString(), class: "hint" }, time.toLocaleString()),
				entry.again ? h("button", { type: "button", onclick: () => this.onuse(entry.again) }, "Use again") : null,
			),
			h("p", { class: "hint" }, [entry.model, entry.state, ...figures].filter(Boolean).join(" · ")),
			h("p", { class: "asked" }, entry.asked),
			h(
				"details",
				{ class: entry.state === "failed" ? "answered bad" : "answered" },
				h("summary", {}, h("span", {}, entry.answer || "no text")),
				h("p", {}, entry.answer),
			),
		);
	}
}

const shortened = (text) => (text.length > MOST_CHARACTERS ? `${text.slice(0, MOST_CHARACTERS)}…` : text);

// Stored entries are checked: another release, or another program at this address, may have stored other values.
const isText = (value) => typeof value === "string";
const isEntry = (entry) =>
	[entry?.title, entry?.asked, entry?.state, entry?.answer].every(isText) &&
	Number.isFinite(entry.at) &&
	Array.isArray(entry.figures) &&
	(entry.again === null || isRequest(entry.again));

function isRequest({ form, prompt } = {}) {
	const texts = [...Object.values(form?.values ?? {}), ...Object.values(prompt?.texts ?? {}), form?.written ?? ""];
	return (
		Boolean(form?.values && prompt?.texts) &&
		texts.every(isText) &&
		Array.isArray(prompt.messages) &&
		prompt.messages.every((message) => Array.isArray(message) && message.every(isText))
	);
}
