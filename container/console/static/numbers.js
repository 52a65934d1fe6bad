// The contracts of models that turn texts into vectors, ranks or classes, and how these are shown.
//
// `prompt` lists the fields of the body that have the texts, and other names that errors have for these fields.
// `said(numbers, request)` returns the main result in a sentence, and `draw(numbers, request)` shows all results.

import { bar, h, table } from "./dom.js";

const IN_ERRORS = ["input_text", "input_tokens"]; // vLLM's errors use these names for a text that is too long.
const FIRST_NUMBERS = 8;
const MOST_CLASSES = 20;
const NAME_CHARACTERS = 40;

const norm = (vector) => Math.hypot(...vector);
const dot = (a, b) => a.reduce((sum, one, place) => sum + one * b[place], 0);
const short = (number) => String(Number(number.toPrecision(4)));
const isVector = (value) => Array.isArray(value) && value.every((one) => typeof one === "number");
const sent = ({ body }) => JSON.parse(body); // A body written by hand is valid JSON, too: the server has answered it.

// Returns the cosine similarity of two vectors, or null if there is none.
export function cosine(vectors) {
	if (vectors.length !== 2 || vectors[0].length !== vectors[1].length) return null;
	const both = norm(vectors[0]) * norm(vectors[1]);
	return both > 0 ? dot(...vectors) / both : null;
}

function begin(text) {
	return text.length > NAME_CHARACTERS ? `${text.slice(0, NAME_CHARACTERS)}…` : text;
}

// Returns a function that reads a reply: the numbers that `numbersOf` finds in it, or the error.
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
		// Vectors in base64 are shown only in the reply's bytes.
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
