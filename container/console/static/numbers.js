// The contracts of models that make numbers of texts: vectors, ranks and classes; and how their numbers are shown.
//
// `prompt` names the body's fields that have the texts, also as errors name them. `said(numbers, request)` is the main
// thing in a sentence, and `draw(numbers, request)` shows all.

import { bar, h, table } from "./dom.js";

const IN_ERRORS = ["input_text", "input_tokens"]; // vLLM's names of a text that is too long
const FIRST_NUMBERS = 8;
const MOST_CLASSES = 20;
const NAME_CHARACTERS = 40;

const norm = (vector) => Math.hypot(...vector);
const dot = (a, b) => a.reduce((sum, one, place) => sum + one * b[place], 0);
const short = (number) => String(Number(number.toPrecision(4)));
const isVector = (value) => Array.isArray(value) && value.every((one) => typeof one === "number");
const sent = ({ body }) => JSON.parse(body); // also if it was written by hand: it has been answered

// The cosine of two vectors; null if there is none.
export function cosine(vectors) {
	if (vectors.length !== 2 || vectors[0].length !== vectors[1].length) return null;
	const both = norm(vectors[0]) * norm(vectors[1]);
	return both > 0 ? dot(...vectors) / both : null;
}

function begin(text) {
	return text.length > NAME_CHARACTERS ? `${text.slice(0, NAME_CHARACTERS)}…` : text;
}

// Takes the numbers of a reply that `numbersOf` finds in it, or its error.
const reader = (numbersOf) => (record, answer) => {
	if (record.error != null) return answer.fail(record.error.message ?? String(record.error));
	answer.numbers = numbersOf(record);
	answer.prompt = record.usage?.prompt_tokens ?? record.usage?.total_tokens ?? null;
};

const json = { formats: () => [{ id: "json", name: "JSON" }] };

export const NUMBERS = [
	{
		...json,
		id: "embeddings",
		name: "Embeddings",
		kinds: ["embedding"],
		about: "POST /v1/embeddings, as OpenAI has it",
		path: () => "v1/embeddings",
		described: "/v1/embeddings",
		prompt: ["input", ...IN_ERRORS],
		pick: (schemas) => schemas.find((schema) => schema.properties?.input),
		body: ({ texts }, _, values, { model }) => ({
			model: model.names[0] ?? "",
			input: texts.length === 1 ? texts[0] : texts,
			...values(""),
		}),
		// A vector in base64 is in the reply alone.
		read: reader((record) => {
			const vectors = (record.data ?? []).map((one) => one.embedding);
			return vectors.length && vectors.every(isVector) ? vectors : null;
		}),
		label: "Vectors",
		said: (vectors) => {
			const count = vectors.length === 1 ? "One vector" : `${vectors.length} vectors`;
			const both = cosine(vectors);
			return `${count} of ${vectors[0].length} numbers${both == null ? "" : `, cosine ${both.toFixed(4)}`}.`;
		},
		draw: (vectors, request) => {
			const texts = [sent(request).input].flat();
			const rows = vectors.map((vector, place) => [
				begin(named(texts[place], place)),
				String(vector.length),
				norm(vector).toFixed(4),
				vector.slice(0, FIRST_NUMBERS).map(short).join(", ") + (vector.length > FIRST_NUMBERS ? ", …" : ""),
			]);
			return table(["Text", "Size", "Norm", "First numbers"], rows, { "aria-label": "Vectors" });
		},
	},
	{
		...json,
		id: "rerank",
		name: "Rerank",
		kinds: ["reranker", "late interaction"],
		about: "POST /rerank, as vLLM, Jina and Cohere have it",
		path: () => "rerank",
		described: "/rerank",
		prompt: ["query", "documents", ...IN_ERRORS],
		pick: (schemas) => schemas.find((schema) => schema.properties?.documents),
		body: ({ query, documents }, _, values, { model }) => ({
			model: model.names[0] ?? "",
			query,
			documents,
			...values(""),
		}),
		read: reader((record) => (record.results?.length ? record.results : null)),
		label: "Ranks",
		said: ([first], request) => `First: ${begin(textOfRank(first, sent(request)))}`,
		draw: (ranks, request) => {
			const rows = ranks.map((one, place) => [
				String(place + 1),
				one.relevance_score.toFixed(4),
				bar(one.relevance_score),
				textOfRank(one, sent(request)),
			]);
			return table(["Rank", "Score", "", "Text"], rows, { "aria-label": "Ranks" });
		},
	},
	{
		...json,
		id: "classify",
		name: "Classify",
		kinds: ["classifier"],
		about: "POST /classify, as vLLM has it",
		path: () => "classify",
		described: "/classify",
		prompt: ["input", ...IN_ERRORS],
		pick: (schemas) => schemas.find((schema) => schema.properties?.input),
		body: ({ texts }, _, values, { model }) => ({ model: model.names[0] ?? "", input: texts[0], ...values("") }),
		read: reader((record) => (isVector(record.data?.[0]?.probs) ? record.data[0].probs : null)),
		label: "Classes",
		said: (scores, { model }) => {
			const [[name, score]] = classesOf(scores, model);
			return `${name}: ${score.toFixed(4)}`;
		},
		draw: (scores, { model }) => {
			const classes = classesOf(scores, model);
			const rows = classes.slice(0, MOST_CLASSES).map(([name, score]) => [name, score.toFixed(4), bar(score)]);
			const more = classes.length - rows.length;
			return h(
				"div",
				{},
				table(["Class", "Score", ""], rows, { "aria-label": "Classes" }),
				more ? h("p", { class: "hint" }, `${more} more classes are in the reply.`) : null,
			);
		},
	},
];

const named = (text, place) => (typeof text === "string" ? text : `text ${place + 1}`);
const textOfRank = ({ index, document }, { documents }) => named(document?.text ?? documents?.[index], index);

// Names and scores of the classes, the best first.
function classesOf(scores, model) {
	const classes = scores.map((score, place) => [model.labels?.[place] ?? `class ${place}`, score]);
	return classes.sort(([, one], [, other]) => other - one);
}
