// The form of one request: its contract, its format, and the parameters that this contract knows.

import { $, $$, fromTemplate, h, setOptions } from "./dom.js";
import { CONTRACTS, PROMPT_FIELDS, kindOf, served, shape } from "./contracts.js";
import { keyHeader } from "./exchange.js";

// Names with the same meaning. If the contract changes, a value moves to the name that the new contract uses.
const SAME = [
	["max_new_tokens", "max_completion_tokens", "max_tokens"],
	["stop", "stop_sequences"],
	["truncate", "truncate_prompt_tokens"],
	["response_format", "grammar"],
];
const COMMON = [...SAME[0], "temperature", "top_p", "top_k", "seed", "stop"];
const FIRST_VALUES = { max_new_tokens: "128" };

const CITY = {
	type: "object",
	properties: { city: { type: "string" }, country: { type: "string" } },
	required: ["city", "country"],
};
const PLACE = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const WEATHER = { name: "weather", description: "The weather in a city", parameters: PLACE };
// Example values for tools and for JSON. A button next to the parameter puts them into the form.
const EXAMPLES = {
	tools: { tools: [{ type: "function", function: WEATHER }], tool_choice: "required" },
	response_format: { response_format: { type: "json_schema", json_schema: { name: "city", schema: CITY } } },
	grammar: { grammar: { type: "json", value: CITY } },
	guided_json: { guided_json: CITY },
	guided_decoding_guide: { guided_decoding_guide_type: "json", guided_decoding_guide: JSON.stringify(CITY) },
};
const FORMS_OF_JSON = ["response_format", "grammar", "guided_json", "guided_decoding_guide"];

const typesOf = (schema) => {
	const kinds = (schema.anyOf ?? [schema]).flatMap((one) => one.type ?? (one.properties || one.$ref ? "object" : []));
	return kinds.filter((kind) => kind !== "null");
};

const itemsOf = (schema) => schema.items ?? (schema.anyOf ?? []).find((one) => one.items)?.items;

function valuesOf(schema) {
	for (const one of schema.anyOf ?? [schema]) if (one.enum) return one.enum;
	const constants = (schema.anyOf ?? []).filter((one) => one.const != null).map((one) => one.const);
	return constants.length > 1 && !schema.anyOf.some((one) => one.$ref) ? constants : null;
}

function limits(schema) {
	const one = (schema.anyOf ?? [schema]).find((part) => part.type === "number" || part.type === "integer") ?? {};
	const small = (bound) => bound != null && Math.abs(bound) < 2 ** 31 - 1;
	const parts = [];
	if (small(one.minimum)) parts.push(`≥ ${one.minimum}`);
	if (small(one.exclusiveMinimum)) parts.push(`> ${one.exclusiveMinimum}`);
	if (small(one.maximum)) parts.push(`≤ ${one.maximum}`);
	return parts.join(", ");
}

// Returns the typed text as a JSON value. If it does not fit the type, it is sent unchanged, and the server reports the
// fault.
export function valueOf(text, schema) {
	const types = typesOf(schema);
	const trimmed = text.trim();
	if (types.includes("boolean") && (trimmed === "true" || trimmed === "false")) return trimmed === "true";
	if ((types.includes("integer") || types.includes("number")) && /^-?\d+(\.\d+)?([eE][+-]?\d+)?$/.test(trimmed)) {
		const number = Number(trimmed);
		return Number.isInteger(number) && !Number.isSafeInteger(number) && JSON.rawJSON ? JSON.rawJSON(trimmed) : number;
	}
	const inString = schema.contentMediaType === "application/json";
	if (
		!inString &&
		/^["[{]/.test(trimmed) &&
		(types.some((type) => type === "array" || type === "object") || trimmed[0] === '"')
	) {
		try {
			const value = JSON.parse(trimmed);
			if (typeof value !== "string" || types.includes("string")) return value;
			return types.includes("array") ? [value] : value;
		} catch {
			return text;
		}
	}
	if (types.includes("array") && !types.includes("string") && itemsOf(schema)?.type === "string") return [text];
	return text;
}

export class RequestForm {
	// `context()` returns the document, the state, the kind of the model, and whether the prompt is a chat.
	constructor(title, context, onchange) {
		this.context = context;
		this.onchange = onchange;
		this.values = { ...FIRST_VALUES };
		this.written = null; // The body, if it was written by hand.
		this.element = fromTemplate("variant-template");
		this.prefix = `v${Math.random().toString(36).slice(2, 8)}`;
		for (const name of ["contract", "format", "model", "endpoint", "logprobs", "filter", "body"]) {
			this[name] = $(`[name=${name}]`, this.element);
		}
		this.title = title;
		for (const select of [this.contract, this.model, this.endpoint])
			select.addEventListener("change", () => this.refresh());
		this.format.addEventListener("change", () => this.#changed());
		this.logprobs.addEventListener("change", () => this.#toggleLogprobs());
		this.filter.addEventListener("input", () => this.#filter());
		this.body.addEventListener("input", () => {
			this.written = this.body.value;
			this.#changed();
		});
		$("details.body", this.element).addEventListener("toggle", () => this.preview());
		$(".unedit", this.element).addEventListener("click", () => {
			this.written = null;
			this.#changed();
			this.body.focus();
		});
		$(".reset", this.element).addEventListener("click", () => {
			this.values = {};
			this.written = null;
			this.logprobs.checked = false;
			this.refresh();
			this.contract.focus();
		});
	}

	set title(text) {
		$(".variant-title", this.element).textContent = text;
	}

	// Returns the choices and the typed values as data for `restore`.
	get saved() {
		const chosen = ["model", "contract", "endpoint", "format"].map((name) => [name, this[name].value]);
		return { ...Object.fromEntries(chosen), values: { ...this.values }, written: this.written };
	}

	restore({ values, written, ...chosen }) {
		this.values = { ...values };
		this.written = written;
		this.logprobs.checked = false;
		if (written != null) {
			this.body.value = written;
			$("details.body", this.element).open = true;
		}
		for (const [name, value] of Object.entries(chosen)) {
			this[name].value = value;
			this.refresh();
		}
	}

	get chosen() {
		return CONTRACTS.find((one) => one.id === this.contract.value);
	}

	get modelPlace() {
		return Number(this.model.value) || 0;
	}

	get chosenModel() {
		return this.context().state.models[this.modelPlace];
	}

	// Rebuilds the parts that depend on the server or the contract. Values are kept.
	refresh() {
		const { document: description, state } = this.context();
		const several = state.models.length > 1;
		this.model.closest("label").hidden = !several;
		setOptions(
			this.model,
			state.models.map((model, place) => [String(place), [model.name, model.version].filter(Boolean).join(":")]),
			this.model.value,
		);
		const { chat, kind } = this.context();
		setOptions(
			this.contract,
			served(description, state, this.chosenModel).map((one) => [one.id, one.name]),
			this.contract.value,
		);
		const contract = this.chosen;
		this.endpoint.closest("label").hidden = contract?.id !== "sagemaker";
		setOptions(
			this.endpoint,
			state.endpoints.map((name) => [name, name]),
			this.endpoint.value,
		);
		const setting = { chat, model: this.chosenModel };
		const own = kindOf(this.chosenModel);
		this.shape = contract && own === kind ? shape(contract, description, setting) : null;
		const hint = $(".contract-hint", this.element);
		const nameless = !state.single && ["tgi", "happy_vllm"].includes(contract?.id);
		if (!state.models.length) hint.textContent = "The server has no model yet.";
		else if (own !== kind) hint.textContent = `The prompt is for a model of the kind ${kind}: choose one.`;
		else if (!contract && own !== "generation") hint.textContent = `The console has no request for a ${own}.`;
		else if (!this.shape) hint.textContent = contract?.noChat ?? "";
		else
			hint.textContent = nameless
				? "Its requests name no model: the one of the server's start answers."
				: contract.about;
		hint.hidden = !hint.textContent;
		setOptions(
			this.format,
			(this.shape?.formats ?? []).map((one) => [one.id, one.name]),
			this.format.value,
		);
		this.#build();
		this.#changed();
	}

	#build() {
		const fields = this.shape?.fields ?? [];
		const names = fields.map((field) => field.name);
		for (const group of SAME) {
			const given = group.find((name) => this.values[name]);
			const here = group.find((name) => names.includes(name));
			if (!given || !here || names.includes(given)) continue;
			this.values[here] = this.values[given];
			delete this.values[given];
		}
		const common = COMMON.filter((name) => names.includes(name));
		const tokens = SAME[0].filter((name) => common.includes(name));
		const shown = common.filter((name) => !tokens.slice(1).includes(name));
		const json = FORMS_OF_JSON.find((name) => names.includes(name));
		this.structured = ["tools", "tool_choice", "guided_decoding_guide_type", json].filter((name) => names.includes(name));
		const rest = names.filter((name) => !shown.includes(name) && !this.structured.includes(name));
		const fill = (selector, list) =>
			$(selector, this.element).replaceChildren(...list.map((name) => this.#row(fields[names.indexOf(name)])));
		fill(".common", shown);
		fill(".structured .parameters", this.structured);
		fill(".rest", rest);
		$(".structured", this.element).hidden = !this.structured.length;
		$(".more", this.element).hidden = !rest.length;
		this.#filter();
	}

	#row({ name, schema }) {
		const { help, state } = this.context();
		const id = `${this.prefix}-${name}`;
		const types = typesOf(schema);
		const choices = types.includes("boolean") && types.length === 1 ? ["true", "false"] : valuesOf(schema);
		const fallback =
			schema.default == null || schema.default === "" || (Array.isArray(schema.default) && !schema.default.length)
				? ""
				: String(schema.default);
		const text = (schema.description || help[name] || "").split(/(?<=\.)\s/)[0];
		const bounds = limits(schema);
		const hint = [text, bounds && `${bounds}.`].filter(Boolean).join(" ");
		const common = { id, name, "data-name": name, "aria-describedby": hint ? `${id}-help` : null };
		const wide = name in EXAMPLES || (types.includes("array") && itemsOf(schema)?.$ref != null);
		let control;
		if (choices) {
			control = h(
				"select",
				common,
				h("option", { value: "" }, fallback ? `default: ${fallback}` : "default"),
				...choices.map((one) => h("option", {}, String(one))),
			);
		} else {
			const number = types.includes("integer") || types.includes("number");
			const kind = types.includes("object") ? "JSON" : types.includes("array") ? "text or JSON array" : "";
			const names = name === "model" || name === "adapters" ? `${id}-names` : null;
			control = h(wide ? "textarea" : "input", {
				...common,
				...(wide ? { rows: "4", spellcheck: "false" } : { type: "text" }),
				inputmode: number ? "decimal" : null,
				placeholder: fallback || kind,
				autocomplete: "off",
				list: names,
			});
			if (names) {
				const adapters = (this.chosenModel?.adapters ?? []).map((one) => one.name);
				const known = name === "model" ? [...(this.chosenModel?.names ?? []), ...adapters] : adapters;
				control = [control, h("datalist", { id: names }, ...known.map((value) => h("option", { value })))];
			}
		}
		const input = [control].flat()[0];
		input.value = this.values[name] ?? "";
		input.addEventListener("input", () => {
			if (input.value === "") delete this.values[name];
			else this.values[name] = input.value;
			this.unmark();
			this.#changed();
		});
		const problem = h("p", { class: "problem", id: `${id}-problem`, hidden: true });
		return h(
			"div",
			{ class: wide ? "parameter wide" : "parameter", "data-parameter": name },
			h("label", { for: id }, ...name.split(/(?<=_)/).flatMap((part) => [part, h("wbr")])),
			name in EXAMPLES
				? h("button", { type: "button", class: "example", "aria-label": `Example for ${name}`, onclick: () => this.#example(name) }, "Example")
				: null,
			...[control].flat(),
			problem,
			hint ? h("p", { class: "hint", id: `${id}-help` }, hint) : null,
		);
	}

	#example(name) {
		for (const [other, value] of Object.entries(EXAMPLES[name]))
			this.values[other] = typeof value === "string" ? value : JSON.stringify(value, null, 2);
		this.written = null;
		this.#build();
		this.#changed();
		const control = $(`[name="${name}"]`, this.element);
		control.focus();
		control.setSelectionRange(0, 0);
		control.scrollTop = 0;
	}

	#filter() {
		const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
		for (const row of $$(".rest .parameter", this.element)) {
			const text = row.textContent.toLowerCase();
			row.hidden = !words.every((word) => text.includes(word));
		}
	}

	#toggleLogprobs() {
		const asked = this.chosen.logprobs(this.#format(), this.context().chat);
		for (const [name, value] of Object.entries(asked)) {
			if (this.logprobs.checked) this.values[name] = String(value);
			else delete this.values[name];
		}
		this.#build();
		this.#changed();
	}

	#format() {
		return this.shape?.formats.find((one) => one.id === this.format.value) ?? this.shape?.formats[0];
	}

	#changed() {
		const set = (this.shape?.fields ?? []).filter((field) => this.values[field.name]).length;
		const structured = (this.structured ?? []).filter((name) => this.values[name]).length;
		$(".structured .count", this.element).textContent = structured ? `${structured} set` : "";
		$(".more .count", this.element).textContent = `${this.shape?.fields.length ?? 0}${set ? `, ${set} set` : ""}`;
		$(".reset", this.element).hidden = !set && this.written == null;
		$(".edited", this.element).textContent = this.written == null ? "" : "written by hand";
		$(".unedit", this.element).disabled = this.written == null;
		const asked = this.shape ? this.chosen.logprobs?.(this.#format(), this.context().chat) : null;
		this.logprobs.closest("label").hidden = !Object.keys(asked ?? {}).length;
		this.onchange(this);
		this.preview();
	}

	// Shows the body as it would be sent, but only if its section is open. A body with an image is so long that showing
	// it slows down the page.
	preview() {
		const request = this.request();
		const open = $("details.body", this.element).open;
		if (this.written == null && request && open) this.body.value = pretty(request.document);
	}

	// Returns the request that would be sent now, or null if the contract has none for this prompt.
	request() {
		const contract = this.chosen;
		const format = this.#format();
		const { chat, input, base, state } = this.context();
		const model = this.chosenModel;
		if (!contract || !model || !this.shape || !format) return null;
		const values = (place) => {
			const found = {};
			for (const field of this.shape.fields) {
				const text = this.values[field.name];
				if (field.place === place && text) found[field.name] = valueOf(text, field.schema);
			}
			return found;
		};
		const setting = { chat, model, single: state.single, endpoint: this.endpoint.value };
		const document = contract.body(input(), format, values, setting);
		const path = contract.path(format, setting);
		return {
			contract,
			format,
			chat,
			model,
			endpoint: setting.endpoint,
			document,
			path: `/${path}`,
			url: new URL(path, base).href,
			headers: { "content-type": "application/json", ...contract.headers?.(format, setting), ...keyHeader() },
			body: this.written ?? JSON.stringify(document),
			written: this.written != null,
			read: contract.read,
			title: `${contract.name}, ${format.name}`,
			names: [...new Set([...this.shape.fields.map((field) => field.name), ...(contract.prompt ?? PROMPT_FIELDS)])],
		};
	}

	// Marks the field that an error is about. Returns false if the form has no such field.
	mark(name, message) {
		const row = $(`[data-parameter="${CSS.escape(name)}"]`, this.element);
		if (!row) return false;
		const control = $("input, select, textarea", row);
		const problem = $(".problem", row);
		row.hidden = false;
		if (row.closest("details")) row.closest("details").open = true;
		row.classList.add("wrong");
		control.setAttribute("aria-invalid", "true");
		control.setAttribute("aria-errormessage", problem.id);
		problem.textContent = message;
		problem.hidden = false;
		row.scrollIntoView({ block: "nearest" });
		return true;
	}

	unmark() {
		for (const row of $$(".wrong", this.element)) {
			row.classList.remove("wrong");
			$("[aria-invalid]", row).removeAttribute("aria-invalid");
			$(".problem", row).hidden = true;
		}
	}
}

function pretty(document) {
	return JSON.stringify(document, null, 2);
}
