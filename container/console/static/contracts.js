// The contracts: where their parameters are, how their requests are written, and how their answers are read.
//
// `read(record, answer)` reads one record of a stream, or a whole answer. For each token, it calls
// `answer.token(text, logprob, tops)`. It also calls `answer.finish(reason)`, `answer.count(tokens)` and
// `answer.fail(message)`.

import { NUMBERS } from "./numbers.js";

const own = new Set([
	"inputs",
	"messages",
	"prompt",
	"text_input",
	"stream",
	"streaming",
	"parameters",
	"prompt_embeds",
	...NUMBERS.flatMap((contract) => contract.prompt),
]);

// Returns the fields of a schema: { name, place, schema }. `place` is "parameters" for fields in `parameters`, else "".
function fieldsOf(schema, resolve) {
	const found = [];
	const nested = resolve(schema?.properties?.parameters)?.properties ?? {};
	for (const [name, field] of Object.entries(nested)) found.push({ name, place: "parameters", schema: field });
	for (const [name, field] of Object.entries(schema?.properties ?? {})) {
		if (own.has(name) || name in nested) continue;
		found.push({ name, place: "", schema: field });
	}
	return found;
}

function logprobsOf(tops, sampled) {
	return (tops ?? [])
		.map((top) => [top.token ?? top.text ?? "", top.logprob ?? top.log_prob])
		.filter(([text]) => text !== sampled);
}

function readLmi(record, answer) {
	if (Array.isArray(record)) record = record[0] ?? {};
	if (record.choices) return readOpenAi(record, answer);
	if (record.error != null && !record.token?.text) {
		return answer.fail(typeof record.error === "string" ? record.error : JSON.stringify(record.error));
	}
	const details = record.details;
	if (record.token) {
		const { text, log_prob: ours, logprob = ours, special, special_token: hidden = special } = record.token;
		answer.token(hidden ? "" : (text ?? ""), logprob, logprobsOf(record.top_tokens, text));
	} else if (details?.tokens?.length) {
		const texts = details.tokens.map((token) => (token.special || token.special_token ? "" : token.text));
		const prefix = (record.generated_text ?? "").length - texts.join("").length;
		if (prefix > 0) answer.token(record.generated_text.slice(0, prefix), null, [], true);
		details.tokens.forEach((token, place) => {
			const tops = logprobsOf(details.top_tokens?.[place], token.text);
			answer.token(texts[place], token.log_prob ?? token.logprob, tops);
		});
	} else if (record.generated_text != null) {
		answer.whole(record.generated_text);
	}
	if (details?.finish_reason) answer.finish(details.finish_reason);
	if (details?.generated_tokens != null) answer.count(details.generated_tokens);
}

function readTriton(record, answer) {
	if (record.error != null) return answer.fail(record.error);
	const text = Array.isArray(record.text_output) ? record.text_output[0] : record.text_output;
	let logprobs = null;
	try {
		logprobs = typeof record.logprobs === "string" ? JSON.parse(record.logprobs) : record.logprobs;
	} catch {
		// The log probabilities cannot be read. The reply's bytes show them.
	}
	if (Array.isArray(logprobs) && logprobs.length) {
		// The text shows which candidates were sampled. It is read from its end, because it may begin with the prompt.
		let rest = text ?? "";
		const sampled = logprobs.map((one) => Object.values(one ?? {})).reverse();
		const tokens = sampled.map((candidates) => {
			const ends = (one) => one.decoded_token && rest.endsWith(one.decoded_token);
			const found = candidates.find(ends) ?? { decoded_token: "" };
			rest = rest.slice(0, rest.length - found.decoded_token.length);
			const others = candidates.filter((one) => one !== found);
			return [found.decoded_token, found.logprob, others.map((one) => [one.decoded_token, one.logprob])];
		});
		if (rest) answer.token(rest, null, [], true);
		for (const token of tokens.reverse()) answer.token(...token);
	} else if (text != null) {
		if (answer.streamed) answer.token(text, null);
		else answer.whole(text);
	}
	const reason = Array.isArray(record.finish_reason) ? record.finish_reason[0] : record.finish_reason;
	if (reason && reason !== "None") answer.finish(reason);
	const tokens = [record.num_output_tokens].flat()[0];
	if (tokens != null && !answer.streamed) answer.count(tokens);
}

function readHappy(record, answer) {
	if (record.detail != null) {
		const detail = Array.isArray(record.detail)
			? record.detail.map((one) => one.msg).join("; ")
			: String(record.detail);
		return answer.fail(detail);
	}
	const text = record.responses?.[0];
	if (text == null) return;
	if (answer.streamed) {
		if (text.length > answer.text.length) answer.token(text.slice(answer.text.length), null);
	} else {
		answer.whole(text);
	}
	const reason = record.finish_reasons?.[0];
	if (reason && reason !== "None") answer.finish(reason);
	if (record.usages?.[0]) answer.count(record.usages[0].completion_tokens);
}

function readOpenAi(record, answer) {
	if (record.error != null) return answer.fail(record.error.message ?? String(record.error));
	if (record.object === "error") return answer.fail(record.message);
	const choice = record.choices?.[0];
	if (record.usage?.completion_tokens != null) answer.count(record.usage.completion_tokens);
	if (!choice || choice.index > 0) return;
	const text = choice.text ?? choice.delta?.content ?? choice.message?.content ?? "";
	const thought = choice.delta?.reasoning ?? choice.message?.reasoning;
	if (thought) answer.token(thought, null, [], true);
	const logprobs = choice.logprobs;
	if (logprobs?.content?.length) {
		for (const one of logprobs.content) answer.token(one.token, one.logprob, logprobsOf(one.top_logprobs, one.token));
	} else if (logprobs?.tokens?.length) {
		logprobs.tokens.forEach((token, place) => {
			const tops = Object.entries(logprobs.top_logprobs?.[place] ?? {}).filter(([other]) => other !== token);
			answer.token(token, logprobs.token_logprobs[place], tops);
		});
	} else if (text) {
		if (answer.streamed) answer.token(text, null);
		else answer.whole(text);
	}
	const calls = choice.delta?.tool_calls ?? choice.message?.tool_calls;
	for (const { function: called = {} } of calls ?? [])
		answer.token(`${called.name ? `→ ${called.name} ` : ""}${called.arguments ?? ""}`, null);
	if (choice.finish_reason) answer.finish(choice.finish_reason);
}

const EVENTS_OR_JSON = [
	{ id: "sse", name: "SSE, streamed", stream: true },
	{ id: "json", name: "JSON" },
];

const lmiFormats = (fields, { chat, model, streams }) => {
	const compat = model?.tgi_compat && !chat;
	const suffix = compat ? ", as TGI" : "";
	const named = fields.some((field) => field.name === "output_formatter") && !chat;
	const formats = [{ id: "json", name: `JSON${suffix}` }];
	if (!streams) return formats;
	if (chat) return [{ id: "stream", name: "Streamed", stream: true }, ...formats];
	const lines = { id: "jsonlines", name: `JSON lines, streamed${suffix}`, stream: true };
	const events = { id: "sse", name: `SSE, streamed${suffix}`, stream: true };
	if (compat && named) return [events, { ...lines, formatter: "jsonlines" }, ...formats];
	return named ? [lines, { ...events, formatter: "sse" }, ...formats] : [lines, ...formats];
};

// In LMI, a prompt's parameters are in `parameters`. A chat's parameters are next to `messages`, as in OpenAI's API.
function lmiBody(input, format, values) {
	if (input.messages) return { messages: input.messages, ...values(""), ...(format.stream ? { stream: true } : {}) };
	const parameters = { ...values("parameters"), ...(format.formatter ? { output_formatter: format.formatter } : {}) };
	return {
		inputs: input.prompt,
		...(Object.keys(parameters).length ? { parameters } : {}),
		...values(""),
		...(format.stream ? { stream: true } : {}),
	};
}

function lmiLogprobs(format, chat) {
	if (chat) return { logprobs: true };
	return format.stream ? {} : { details: true };
}

const lmi = {
	id: "lmi",
	name: "LMI",
	chat: true,
	about: "POST /invocations, as DJL-Serving's LMI answers it",
	path: (_, { model, single }) =>
		single
			? "invocations"
			: `predictions/${[model.name, model.version].filter(Boolean).map(encodeURIComponent).join("/")}`,
	described: "/invocations",
	pick: (schemas, chat) => schemas.find((schema) => (chat ? schema.properties?.messages : schema.properties?.inputs)),
	formats: lmiFormats,
	body: lmiBody,
	read: readLmi,
	logprobs: lmiLogprobs,
};

export const CONTRACTS = [
	lmi,
	{
		id: "openai",
		name: "OpenAI",
		chat: true,
		about: "POST /v1/completions and /v1/chat/completions",
		path: (_, { chat }) => (chat ? "v1/chat/completions" : "v1/completions"),
		described: (chat) => (chat ? "/v1/chat/completions" : "/v1/completions"),
		formats: () => EVENTS_OR_JSON,
		body: (input, format, values, { model }) => ({
			model: model?.names?.[0] ?? "",
			...(input.messages ? { messages: input.messages } : { prompt: input.prompt }),
			...values(""),
			...(format.stream ? { stream: true } : {}),
		}),
		read: readOpenAi,
		logprobs: (_, chat) => (chat ? { logprobs: true, top_logprobs: 2 } : { logprobs: 2 }),
	},
	{
		id: "tgi",
		name: "TGI",
		about: "POST /generate and /generate_stream, as Text Generation Inference answers them",
		noChat: "TGI's chat is OpenAI's: choose that contract",
		path: (format) => (format.stream ? "generate_stream" : "generate"),
		described: "/generate",
		formats: () => EVENTS_OR_JSON,
		body: (input, _, values) => {
			const parameters = values("parameters");
			return { inputs: input.prompt, ...(Object.keys(parameters).length ? { parameters } : {}), ...values("") };
		},
		read: readLmi,
		logprobs: (format) => (format.stream ? {} : { details: true }),
	},
	{
		id: "triton",
		name: "Triton generate",
		noChat: "Triton's generate has no chat: choose OpenAI or LMI",
		about: "POST /v2/models/<model>/generate and generate_stream",
		path: (format, { model }) =>
			`v2/models/${encodeURIComponent(model?.name ?? "model")}/generate${format.stream ? "_stream" : ""}`,
		described: "/v2/models/{model}/generate",
		formats: () => EVENTS_OR_JSON,
		body: (input, format, values) => {
			const parameters = values("parameters");
			return {
				text_input: input.prompt,
				...(format.stream ? { stream: true } : {}),
				...values(""),
				...(Object.keys(parameters).length ? { parameters } : {}),
			};
		},
		read: readTriton,
		logprobs: () => ({ return_logprobs: true, logprobs: 1 }),
	},
	{
		id: "happy_vllm",
		name: "happy_vllm",
		noChat: "happy_vllm's chat is OpenAI's: choose that contract",
		about: "POST /v1/generate and /v1/generate_stream",
		path: (format) => (format.stream ? "v1/generate_stream" : "v1/generate"),
		described: "/v1/generate",
		formats: () => [
			{ id: "stream", name: "Lines, streamed", stream: true },
			{ id: "json", name: "JSON" },
		],
		body: (input, _, values) => ({ prompt: input.prompt, ...values("") }),
		read: readHappy,
	},
	{
		...lmi,
		id: "sagemaker",
		name: "SageMaker runtime",
		about: "InvokeEndpoint and InvokeEndpointWithResponseStream of the local endpoint, with LMI's body",
		path: (format, { endpoint }) =>
			`endpoints/${encodeURIComponent(endpoint)}/invocations${format.stream ? "-response-stream" : ""}`,
		formats: (fields, setting) =>
			lmiFormats(fields, setting).map((format) => ({
				...format,
				name: `${format.stream ? "Response stream" : "InvokeEndpoint"}, ${format.name.replace(", streamed", "")}`,
			})),
		headers: (_, { model, single }) => (single ? {} : { "X-Amzn-SageMaker-Target-Model": model.name }),
	},
	...NUMBERS,
];

// Returns the kind of a model. A model that is not loaded yet counts as a model that generates text.
export const kindOf = (model) => model?.kind ?? "generation";

// Returns the contracts that a server has for a model, according to `/openapi.json` and the server's state.
export function served(document, state, model) {
	return CONTRACTS.filter((contract) => {
		if (!(contract.kinds ?? ["generation"]).includes(kindOf(model))) return false;
		if (contract.id === "sagemaker") return state.endpoints.length > 0;
		return requestSchemas(contract, document, false) != null || requestSchemas(contract, document, true) != null;
	});
}

// Returns a function that resolves the references in a document.
export function resolver(document) {
	return (schema) => (schema?.$ref ? document.components.schemas[schema.$ref.split("/").pop()] : schema);
}

function requestSchemas(contract, document, chat) {
	const described = typeof contract.described === "function" ? contract.described(chat) : contract.described;
	const content = document.paths[described]?.post?.requestBody?.content;
	if (!content) return null;
	const schema = resolver(document)(Object.values(content)[0].schema);
	return (schema?.anyOf ?? [schema]).map(resolver(document));
}

// Returns the fields and formats that a contract has for a prompt or a chat, or null if it does not accept this kind.
export function shape(contract, document, setting) {
	if (setting.chat && !contract.chat) return null;
	const schemas = requestSchemas(contract, document, setting.chat);
	if (!schemas) return null;
	const schema = contract.pick ? contract.pick(schemas, setting.chat) : schemas[0];
	const fields = schema ? fieldsOf(schema, resolver(document)) : [];
	const streams = Boolean(schema?.properties?.stream);
	return { fields, formats: contract.formats(fields, { ...setting, streams }) };
}

// Returns the field that an error is about: a member or the text of the error names it. Null if neither names a field.
export function guilty(text, document, names) {
	const said = [
		document?.error?.param,
		document?.param,
		...(Array.isArray(document?.detail) ? document.detail.map((one) => one.loc?.join(".")) : []),
	];
	for (const name of said) {
		const last = typeof name === "string" ? name.split(".").pop() : null;
		if (names.includes(last)) return last;
	}
	const quoted = [...text.matchAll(/`([\w.]+)`/g)].map((match) => match[1].split(".").pop());
	const found = quoted.find((name) => names.includes(name));
	if (found) return found;
	// An error about an adapter is about the field `adapters`.
	const words = (text.match(/\w+/g) ?? []).flatMap((word) => [word, `${word}s`]);
	return words.filter((word) => names.includes(word)).sort((a, b) => b.length - a.length)[0] ?? null;
}

export const PROMPT_FIELDS = ["inputs", "messages", "prompt", "text_input"];
