// Explain: a request that asks what the server makes of it, and how the explanation is shown.

import { h, shortened, table } from "./dom.js";

const ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"; // SageMaker's API passes no other header on; a handler of the model's own takes the header alone
const MOST_IDS = 500; // of a prompt; the reply has them all

// The same request, which is explained in place of being answered.
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
