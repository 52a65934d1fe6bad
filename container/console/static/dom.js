// Makes elements from data. A string always becomes text: no code of the page turns a string into markup.

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

// Makes an element with attributes, listeners (`onclick`) and children. An attribute that is false or null is left out.
export function h(tag, attributes = {}, ...children) {
	const element = document.createElement(tag);
	for (const [name, value] of Object.entries(attributes)) {
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
	}
	element.append(...children.filter((child) => child != null));
	return element;
}

export function fromTemplate(id) {
	return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

export function setOptions(select, options, chosen) {
	select.replaceChildren(...options.map(([value, text]) => h("option", { value }, text)));
	select.value = options.some(([value]) => value === chosen) ? chosen : options[0]?.[0];
}

// A table in a region that scrolls. The first cell of each row is its head.
export function table(head, rows, attributes = {}) {
	const cells = (row) => row.map((value, place) => (place ? h("td", {}, value) : h("th", { scope: "row" }, value)));
	return h(
		"div",
		{ class: "scroll", tabindex: "0", role: "region", ...attributes },
		h(
			"table",
			{},
			h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
			h("tbody", {}, ...rows.map((row) => h("tr", {}, ...cells(row)))),
		),
	);
}

// A bar for a share from 0 to 1.
export function bar(share) {
	const element = h("span", { class: "share", "aria-hidden": "true" });
	element.style.setProperty("--share", `${Math.min(1, Math.max(0, share)) * 100}%`);
	return element;
}

const DATA = ";base64,";
const MOST_DATA = 4000; // characters

// Returns a text in which long data URLs are cut off, because a browser would take seconds to lay them out.
export function shortened(text) {
	const [head, ...parts] = text.split(DATA);
	const short = parts.map((part) => {
		const found = part.search(/[^\w+/=]/);
		const end = found < 0 ? part.length : found;
		return end <= MOST_DATA ? part : `${part.slice(0, 60)}… (${bytesText(end)})${part.slice(end)}`;
	});
	return [head, ...short].join(DATA);
}

export function milliseconds(value) {
	if (value == null || Number.isNaN(value)) return "–";
	if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
	return value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
}

export function bytesText(count) {
	return count < 10000 ? `${count} bytes` : `${(count / 1000).toFixed(count < 100000 ? 1 : 0)} kB`;
}

export function rate(value) {
	return value == null || !Number.isFinite(value)
		? "–"
		: value >= 100
			? Math.round(value).toString()
			: value.toFixed(1);
}

// Copies a text, and returns true if it was copied. Browsers allow this to pages on https and localhost. On other pages,
// the text is selected and copied in an older way.
export async function copy(text, element) {
	try {
		await navigator.clipboard.writeText(text);
		return true;
	} catch {
		element.textContent = text;
		getSelection().selectAllChildren(element);
		return document.execCommand("copy");
	}
}
