// The requests that were sent, in this browser's own storage: what was asked and answered. Keys and images are left out.

import { $, h, milliseconds } from "./dom.js";

const PLACE = "slipway.history";
const MOST_ENTRIES = 50;
const MOST_CHARACTERS = 20_000; // of a prompt, a body or an answer
const MOST_BYTES = 1_000_000; // of all entries

export class History {
	// `onuse(entry)` puts an entry into the form.
	constructor(onuse) {
		this.onuse = onuse;
		this.entries = [];
		this.#read();
		$("#clear-history").addEventListener("click", () => this.#keep([]));
		this.draw();
	}

	// Adds what was sent, the newest first. `form` and `prompt` are what the form restores.
	add(form, prompt, { contract, format, model }, exchange) {
		const { tokens, firstToken, total } = exchange.figures();
		const { text, numbers, error } = exchange.answer;
		const entry = {
			at: Date.now(),
			title: `${contract.name}, ${format.name}`,
			model: model.name,
			form,
			prompt,
			state: exchange.state,
			figures: [tokens, firstToken, total],
			answer: numbers ? JSON.stringify(numbers) : error || exchange.failure || text,
		};
		this.#read();
		this.#keep([JSON.parse(JSON.stringify(entry, shortened)), ...this.entries].slice(0, MOST_ENTRIES));
	}

	// Takes the entries of this browser, which another page may have changed.
	#read() {
		try {
			this.entries = JSON.parse(localStorage.getItem(PLACE)) ?? [];
		} catch {
			// This browser keeps nothing.
		}
	}

	// Keeps entries, without the oldest ones if all are too long.
	#keep(entries) {
		let text = JSON.stringify(entries);
		while (text.length > MOST_BYTES) {
			entries = entries.slice(0, -1);
			text = JSON.stringify(entries);
		}
		this.entries = entries;
		try {
			localStorage.setItem(PLACE, text);
		} catch {
			// The entries last until the page is loaded again.
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
				h("button", { type: "button", onclick: () => this.onuse(entry) }, "Use again"),
			),
			h("p", { class: "hint" }, [entry.model, entry.state, ...figures].filter(Boolean).join(" · ")),
			h("p", { class: "asked" }, entry.form.written ?? entry.prompt.asked),
			h(
				"details",
				{ class: entry.state === "failed" ? "answered bad" : "answered" },
				h("summary", {}, h("span", {}, entry.answer || "no text")),
				h("p", {}, entry.answer),
			),
		);
	}
}

const shortened = (_, value) =>
	typeof value === "string" && value.length > MOST_CHARACTERS ? `${value.slice(0, MOST_CHARACTERS)}…` : value;
