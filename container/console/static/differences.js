// Compares two answers to one prompt: their texts word by word, and their timing.

import { h, table } from "./dom.js";
import { FIGURES } from "./result.js";

const WORD = /[\p{L}\p{N}_]+\s*|[^\p{L}\p{N}_\s]\s*|\s+/gu; // A word includes the space after it.
const MOST_CELLS = 4_000_000;

// Returns the parts of both texts in order: [0, text] if both have the part, [-1, text] if only the first has it, and
// [1, text] if only the second has it.
export function differences(first, second) {
	const a = first.match(WORD) ?? [];
	const b = second.match(WORD) ?? [];
	let start = 0;
	while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
	let end = 0;
	while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
	const parts = [
		[0, a.slice(0, start).join("")],
		...middle(a.slice(start, a.length - end), b.slice(start, b.length - end)),
		[0, a.slice(a.length - end).join("")],
	];
	return parts.filter(([, text]) => text);
}

// Keeps the longest common subsequence. If finding it takes too long, all words count as different.
function middle(a, b) {
	if ((a.length + 1) * (b.length + 1) > MOST_CELLS)
		return [
			[-1, a.join("")],
			[1, b.join("")],
		];
	const width = b.length + 1;
	const lengths = new Uint16Array((a.length + 1) * width);
	for (let i = a.length - 1; i >= 0; i -= 1) {
		for (let j = b.length - 1; j >= 0; j -= 1) {
			const at = i * width + j;
			lengths[at] = a[i] === b[j] ? lengths[at + width + 1] + 1 : Math.max(lengths[at + width], lengths[at + 1]);
		}
	}
	const parts = [];
	const add = (kind, text) => {
		if (parts.at(-1)?.[0] === kind) parts.at(-1)[1] += text;
		else parts.push([kind, text]);
	};
	let i = 0;
	let j = 0;
	while (i < a.length || j < b.length) {
		if (i < a.length && j < b.length && a[i] === b[j]) {
			add(0, a[i]);
			i += 1;
			j += 1;
		} else if (j >= b.length || (i < a.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) {
			add(-1, a[i++]);
		} else {
			add(1, b[j++]);
		}
	}
	return parts;
}

const tags = { "-1": "del", 0: "span", 1: "ins" };

export function showDifferences(element, results, prompt) {
	const [a, b] = results.map(({ exchange }) => exchange);
	if (!a || !b || a.running || b.running) {
		element.replaceChildren(
			h(
				"p",
				{ class: "hint" },
				"B is sent when A has ended, so that neither slows the other down. A's prompt may be in the prefix cache then.",
			),
		);
		return;
	}
	const figures = [a.figures(), b.figures()];
	const change = (name, show) => {
		const [one, other] = figures.map((figure) => figure[name]);
		if (one == null || other == null) return "–";
		if (one === other) return "0";
		const share = one ? ` (${other >= one ? "+" : "−"}${Math.round((Math.abs(other - one) / one) * 100)} %)` : "";
		return `${other >= one ? "+" : "−"}${show(Math.abs(other - one))}${share}`;
	};
	const rows = FIGURES.map(([title, name, show]) => [
		title,
		...figures.map((figure) => String(show(figure[name]))),
		change(name, show),
	]);
	const ofNumbers = a.answer.numbers || b.answer.numbers;
	const texts = [a, b].map(({ answer }) =>
		ofNumbers ? JSON.stringify(answer.numbers) : prompt && answer.text.startsWith(prompt) ? answer.text.slice(prompt.length) : answer.text,
	);
	const equal = texts[0] === texts[1];
	const characters = [...texts[0]].length;
	let same = 0;
	while (same < texts[0].length && texts[0][same] === texts[1][same]) same += 1;
	const saidOfTexts = equal
		? `The texts are equal: ${characters} characters.`
		: `The texts part after ${same} characters.`;
	const saidOfNumbers = equal ? "The numbers are equal." : "The numbers differ.";
	const said = ofNumbers ? saidOfNumbers : saidOfTexts;
	const parts = equal || ofNumbers
		? []
		: [h("p", { class: "difference" }, ...differences(...texts).map(([kind, text]) => h(tags[kind], {}, text)))];
	element.replaceChildren(
		table(["", "A", "B", "B − A"], rows, { class: "timing", "aria-label": "Figures of both" }),
		h("div", {}, h("p", { class: "verdict" }, said), ...parts),
	);
}
