// Returns a request as a curl command or as Python code. The Python code uses the contract's usual client, and prints
// the text.

const MOST_ARGUMENT = 100_000; // Bytes. In Linux, an argument may have 128 KiB.

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function curl({ url, headers, body, format }) {
	const lines = Object.entries(headers).map(([name, value]) => `-H ${quoted(`${name}: ${value}`)}`);
	const quiet = format.stream ? "curl -sSN" : "curl -sS";
	const long = new TextEncoder().encode(body).length > MOST_ARGUMENT;
	const data = long ? `--data-binary @- <<'BODY'\n${body}\nBODY` : `--data-raw ${quoted(body)}`;
	return [`${quiet} ${quoted(url)}`, ...lines, data].join(" \\\n  ");
}

// Returns a JSON value as Python code. A JSON string is also a Python string.
function literal(value, indent = "") {
	if (value === null || value === undefined) return "None";
	if (value === true) return "True";
	if (value === false) return "False";
	if (JSON.isRawJSON?.(value)) return value.rawJSON;
	if (typeof value !== "object") return JSON.stringify(value);
	const inner = `${indent}    `;
	const entries = Array.isArray(value)
		? value.map((one) => literal(one, inner))
		: Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, inner)}`);
	const [open, close] = Array.isArray(value) ? "[]" : "{}";
	const line = `${open}${entries.join(", ")}${close}`;
	if (line.length + indent.length <= 88 && !line.includes("\n")) return line;
	return `${open}\n${entries.map((entry) => `${inner}${entry},\n`).join("")}${indent}${close}`;
}

const named = (values, indent = "    ") =>
	Object.entries(values)
		.map(([name, value]) => `${indent}${name}=${literal(value, indent)},\n`)
		.join("");

export function python(request) {
	const body = documentOf(request);
	if (body === undefined) return plainPython(request);
	const writers = { openai: openaiPython, embeddings: embeddingsPython, tgi: hubPython, sagemaker: boto3Python };
	return (writers[request.contract.id] ?? requestsPython)(request, body) ?? requestsPython(request, body);
}

// Returns the body as data, or undefined if it was written by hand and is not a JSON object.
function documentOf({ body, document, written }) {
	if (!written) return document;
	try {
		const value = JSON.parse(body);
		return value && typeof value === "object" && !Array.isArray(value) ? value : undefined;
	} catch {
		return undefined;
	}
}

function plainPython({ url, headers, body }) {
	return `import requests

reply = requests.post(
    ${literal(url)},
    headers=${literal(headers, "    ")},
    data=${literal(body)}.encode(),
)
print(reply.text)
`;
}

// Returns Python code for the text in a record of a stream, or in a whole answer.
function textOf({ contract, chat, format, model }) {
	const first = model?.tgi_compat && !format.stream ? "[0]" : "";
	if (chat && format.stream) return `(record["choices"][0]["delta"].get("content") or "") if record["choices"] else ""`;
	if (chat) return `record["choices"][0]["message"]["content"]`;
	if (contract.id === "rerank") return `record["results"]`;
	if (contract.id === "classify") return `record["data"]`;
	if (contract.id === "triton") return `record["text_output"]`;
	if (contract.id === "happy_vllm") return `record["responses"][0]`;
	if (contract.id === "openai")
		return `record["choices"][0]["text"]${format.stream ? ` if record["choices"] else ""` : ""}`;
	return format.stream
		? `"" if record["token"].get("special") else record["token"]["text"]`
		: `record${first}["generated_text"]`;
}

function requestsPython(request, body) {
	const { url, headers, format, contract } = request;
	const more = Object.keys(headers).some((name) => name !== "content-type") ? `, headers=${literal(headers)}` : "";
	const head = `import json

import requests

url = ${literal(url)}
body = ${literal(body)}
`;
	if (!format.stream) {
		return `${head.replace("import json\n\n", "")}reply = requests.post(url, json=body${more})
reply.raise_for_status()
record = reply.json()
print(${textOf(request)}, end="")
`;
	}
	const repeats = contract.id === "happy_vllm";
	const print = repeats
		? `            text = ${textOf(request)}  # all of it so far
            print(text[shown:], end="", flush=True)
            shown = len(text)`
		: `            print(${textOf(request)}, end="", flush=True)`;
	return `${head}${repeats ? "shown = 0\n" : ""}with requests.post(url, json=body, stream=True${more}) as reply:
    reply.raise_for_status()
    for line in reply.iter_lines():
        line = line.removeprefix(b"data:").strip()
        if line.startswith(b"{"):
            record = json.loads(line)
${print}
`;
}

const OPENAI_ARGUMENTS = new Set(
	(
		"model prompt messages best_of echo frequency_penalty logit_bias logprobs max_tokens max_completion_tokens n " +
		"presence_penalty seed stop stream stream_options suffix temperature top_p user tools tool_choice top_logprobs " +
		"response_format parallel_tool_calls reasoning_effort"
	).split(" "),
);

const EMBEDDING_ARGUMENTS = new Set(["input", "model", "dimensions", "encoding_format", "user"]);

// Returns a call of OpenAI's client. Fields for which the client has no argument are in `extra_body`.
function openaiCall({ url, headers }, body, { path, method, known, print }) {
	const given = {};
	const more = {};
	for (const [name, value] of Object.entries(body)) (known.has(name) ? given : more)[name] = value;
	const base = url.slice(0, url.indexOf(path));
	const extra = Object.keys(more).length ? named({ extra_body: more }) : "";
	return `from openai import OpenAI

client = OpenAI(base_url=${literal(base)}, api_key="${headers.authorization ? "KEY" : "none"}")
answer = client.${method}.create(
${named(given)}${extra})
${print}
`;
}

function openaiPython(request, body) {
	const { chat, format } = request;
	const text = chat ? (format.stream ? 'delta.content or ""' : "message.content") : "text";
	const print = format.stream
		? `for chunk in answer:
    if chunk.choices:
        print(chunk.choices[0].${text}, end="", flush=True)`
		: `print(answer.choices[0].${text}, end="")`;
	const path = chat ? "/chat/completions" : "/completions";
	const method = chat ? "chat.completions" : "completions";
	return openaiCall(request, body, { path, method, known: OPENAI_ARGUMENTS, print });
}

function embeddingsPython(request, body) {
	const print = `for item in answer.data:
    print(len(item.embedding), item.embedding[:8])`;
	return openaiCall(request, body, { path: "/embeddings", method: "embeddings", known: EMBEDDING_ARGUMENTS, print });
}

const HUB_ARGUMENTS = new Set(
	(
		"adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar max_new_tokens " +
		"repetition_penalty return_full_text seed stop temperature top_k top_n_tokens top_p truncate typical_p watermark"
	).split(" "),
);

// Returns a call of Hugging Face's client, or null if the client has no argument for a parameter.
function hubPython({ url, headers, format }, body) {
	const { inputs, parameters = {}, ...rest } = body;
	const given = { ...parameters };
	if (Object.keys(rest).length || !Object.keys(given).every((name) => HUB_ARGUMENTS.has(name))) return null;
	const full = given.return_full_text ?? false; // The client calls /, where TGI's default is true.
	const details = Boolean(given.details);
	const base = url.slice(0, url.lastIndexOf("/"));
	const values = { ...given, return_full_text: full, ...(format.stream ? { stream: true } : {}) };
	const print = format.stream
		? `for piece in answer:
    print(${details ? '"" if piece.token.special else piece.token.text' : "piece"}, end="", flush=True)`
		: `print(answer${details ? ".generated_text" : ""}, end="")`;
	return `from huggingface_hub import InferenceClient

client = InferenceClient(${literal(base)}${headers.authorization ? ', token="KEY"' : ""})
answer = client.text_generation(
    ${literal(inputs)},
${named(values)})
${print}
`;
}

function boto3Python(request, body) {
	const { url, endpoint, format, headers } = request;
	const base = url.slice(0, url.indexOf("/endpoints/"));
	const target = headers["X-Amzn-SageMaker-Target-Model"];
	const add = 'lambda request, **_: request.headers.add_header("x-api-key", "KEY")';
	const key = headers.authorization ? `client.meta.events.register("before-sign", ${add})\n` : "";
	const head = `import json

import boto3

client = boto3.client(
    "sagemaker-runtime",
    endpoint_url=${literal(base)},  # leave these four out to call the endpoint on AWS
    region_name="us-east-1",
    aws_access_key_id="local",
    aws_secret_access_key="local",
)
${key}body = ${literal(body)}
`;
	const call = `(
    EndpointName=${literal(endpoint)},
    ContentType="application/json",
${target ? `    TargetModel=${literal(target)},\n` : ""}    Body=json.dumps(body),
)`;
	if (!format.stream) {
		return `${head}answer = client.invoke_endpoint${call}
record = json.loads(answer["Body"].read())
print(${textOf(request)}, end="")
`;
	}
	return `${head}answer = client.invoke_endpoint_with_response_stream${call}
rest = b""
for event in answer["Body"]:
    *lines, rest = (rest + event["PayloadPart"]["Bytes"]).split(b"\\n")
    for line in lines:
        line = line.removeprefix(b"data:").strip()
        if line.startswith(b"{"):
            record = json.loads(line)
            print(${textOf(request)}, end="", flush=True)
`;
}
