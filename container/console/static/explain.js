// Asks the server to explain how it reads a request, and shows the explanation.

import { h, shortened, table } from "./dom.js";

// SageMaker's API passes on this header, but not `x-slipway-explain`. If the model has a handler of its own, only
// `x-slipway-explain` has an effect.
const ATTRIBUTES = "x-amzn-sagemaker-custom-attributes";
const MOST_IDS = 500; // The maximum number of ids that are shown of a prompt. The reply has all ids.

// Returns the same request with headers that ask the server to explain it instead of answering it.
export function explained(request) {
	const { contract, headers, read } = request;
	return {
		...request,
		title: `${request.title}: explained`,
		headers: {
			...headers,
			[ATTRIBUTES]: [headers[ATTRIBUTES], "explain=1"].filter(Boolean).join("; "),
			"x-slipway-explain": "1",
		},
		contract: { ...contract, label: "Explanation", said, draw },
		read: (record, answer) => {
			if (!record.because) return read(record, answer);
			answer.numbers = record;
			answer.prompt = record.prompts.reduce((sum, prompt) => sum + prompt.tokens, 0);
		},
	};
}

const said = ({ contract, because }) => `${contract}: ${because.join("; ")}`;

const from = ({ from, fields = [] }) => [from ?? "body or default", ...fields].join(", ");

function draw({ prompts, parameters = {}, ...rest }) {
	const lists = { ignored: "Ignored", without_effect: "Without effect", not_held: "Not held", changes_prompt: "Changes the prompt" };
	const rows = Object.entries(parameters).map(([name, one]) => [name, JSON.stringify(one.value), from(one)]);
	const found = Object.keys(lists).filter((name) => rest[name]?.length);
	return h(
		"div",
		{},
		...prompts.map((prompt) =>
			h(
				"div",
				{},
				h("pre", { class: "bytes" }, shortened(prompt.text)),
				h("p", { class: "hint" }, `${prompt.tokens} tokens: ${prompt.token_ids.slice(0, MOST_IDS).join(" ")}`),
			),
		),
		table(["Parameter", "Value", "From"], rows, { "aria-label": "Parameters as the engine gets them" }),
		...found.map((name) => h("p", {}, `${lists[name]}: ${rest[name].join(", ")}`)),
	);
}
