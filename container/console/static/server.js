// The server: its state, its load over the last minutes, its adapters and its settings.

import { $, fromTemplate, h, rate, table } from "./dom.js";
import { call } from "./exchange.js";

const SAMPLE_SECONDS = 2;
const PATIENCE = 10_000; // milliseconds
const STATE_EVERY = 5; // samples
const KEPT_SAMPLES = 150; // five minutes

// Returns the sum of each metric's series, by the name of the metric. Labels are ignored.
export function sums(text) {
	const found = new Map();
	for (const line of text.split("\n")) {
		const match = /^(slipway_\w+?)(?:\{[^}]*\})? ([\d.e+-]+)$/.exec(line);
		if (match && !match[1].endsWith("_bucket")) found.set(match[1], (found.get(match[1]) ?? 0) + Number(match[2]));
	}
	return found;
}

const isIn = ({ models }, wanted) => models.some(({ state }) => state === wanted);

// Polls the state and the metrics of the server while the page is visible.
export class Watch {
	constructor(base, onchange) {
		this.base = base;
		this.onchange = onchange;
		this.state = null;
		this.reachable = true;
		this.samples = []; // { at, tokens, running, waiting, cache, first, gap }
		this.turn = 0;
		document.addEventListener("visibilitychange", () => !document.hidden && this.look());
	}

	start() {
		this.timer = setInterval(() => !document.hidden && this.look(), SAMPLE_SECONDS * 1000);
		return this.look();
	}

	async look() {
		if (this.looking) return;
		this.looking = true;
		try {
			// Most polls read only the metrics. The state is read at every `STATE_EVERY`th poll, and at every poll while
			// something is wrong.
			if (this.turn++ % STATE_EVERY === 0 || this.state?.health.status !== 200 || isIn(this.state, "restarting"))
				this.state = await (await this.#get("console/state")).json();
			this.#sample(sums(await (await this.#get("metrics")).text()));
			if ((this.latest.ready === 1) !== (this.state.health.status === 200)) this.turn = 0;
			this.reachable = true;
		} catch (error) {
			this.locked = error.message === "401";
			this.reachable = false;
			this.turn = 0;
		}
		this.looking = false;
		this.onchange(this);
	}

	async #get(path) {
		const reply = await call(new URL(path, this.base), { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
		if (!reply.ok) throw new Error(reply.status);
		return reply;
	}

	#sample(metrics) {
		const of = (name) => metrics.get(`slipway_${name}`);
		this.samples.push({
			at: performance.now() / 1000,
			ready: of("ready"),
			tokens: of("generated_tokens_total") ?? 0,
			running: of("engine_running"),
			waiting: of("engine_waiting"),
			cache: of("kv_cache_usage_ratio"),
			open: of("open_requests"),
			first: [of("time_to_first_token_seconds_sum") ?? 0, of("time_to_first_token_seconds_count") ?? 0],
			gap: [of("inter_token_seconds_sum") ?? 0, of("inter_token_seconds_count") ?? 0],
		});
		if (this.samples.length > KEPT_SAMPLES) this.samples.shift();
	}

	get latest() {
		return this.samples.at(-1) ?? {};
	}

	// Returns the tokens per second between polls. If the count falls, another process has answered, and the rate is 0.
	get rates() {
		return this.samples.slice(1).map((sample, place) => {
			const before = this.samples[place];
			return Math.max(0, sample.tokens - before.tokens) / (sample.at - before.at || 1);
		});
	}

	// The mean of a histogram over the samples that are kept, in seconds.
	mean(name) {
		if (this.samples.length < 2) return null;
		const [sum, count] = this.samples.at(-1)[name].map((value, place) => value - this.samples[0][name][place]);
		return count > 0 ? sum / count : null;
	}
}

// Returns the kind of the server's state, the state in words, and the load in words.
export function statusLine({ reachable, locked, state, latest, rates }) {
	if (!reachable || !state) return ["unreachable", locked ? "a key is needed" : "the server cannot be reached", ""];
	const { status } = state.health;
	const names = state.models.length === 1 ? state.models[0].name : `${state.models.length} models`;
	const good = isIn(state, "restarting") ? "restarting" : "ready";
	const kind = status === 200 ? good : isIn(state, "starting") ? "starting" : "failed";
	const said = `${names} · ${kind === "failed" ? `unhealthy (${status})` : kind}`;
	if (kind !== "ready" || latest.running == null) return [kind, said, ""];
	return [kind, said, ` · ${latest.running} running · ${latest.waiting} waiting · ${rate(rates.at(-1) ?? 0)} tokens/s`];
}

const words = (value) => (value === null || value === undefined ? "–" : String(value));
const describe = (rows) =>
	h(
		"dl",
		{ class: "facts" },
		...rows.map(([name, ...value]) => h("div", {}, h("dt", {}, name), h("dd", {}, ...value))),
	);
const card = (title, ...content) => h("section", { class: "card" }, h("h2", {}, title), ...content);

export class ServerView {
	constructor(element) {
		this.element = element;
		this.load = h("section", { class: "card", "aria-label": "Load" });
		this.rest = h("div", { class: "cards" });
		element.append(this.load, this.rest);
		this.shown = "";
	}

	draw(watch) {
		if (this.element.hidden || !watch.state) return;
		this.#load(watch);
		const state = JSON.stringify(watch.state);
		if (state === this.shown) return; // Drawing again would delete what a user has typed or selected.
		this.shown = state;
		this.rest.replaceChildren(
			...watch.state.models.map((model) => modelCard(model, watch.state)),
			...adapterCard(watch.state),
			...settingsCards(watch.state),
		);
	}

	#load(watch) {
		const { latest, rates } = watch;
		const minutes = Math.max(1, Math.round(((watch.samples.length - 1) * SAMPLE_SECONDS) / 60));
		const seconds = (value) => (value == null ? "–" : `${(value * 1000).toFixed(1)} ms`);
		const most = Math.max(...rates, 0);
		const average = rates.length ? rates.reduce((sum, one) => sum + one, 0) / rates.length : 0;
		const spark = fromTemplate("spark-template");
		const most1 = Math.max(most, 1);
		const step = 300 / Math.max(rates.length - 1, 1);
		const points = rates.map((one, place) => `${(place * step).toFixed(1)} ${(58 - (one / most1) * 54).toFixed(1)}`);
		if (points.length > 1) {
			$(".line", spark).setAttribute("d", `M${points.join("L")}`);
			$(".area", spark).setAttribute("d", `M0 60L${points.join("L")}L300 60z`);
		}
		const text = `Tokens a second, the last ${minutes === 1 ? "minute" : `${minutes} minutes`}: ${rate(average)} on average, ${rate(most)} at most`;
		spark.setAttribute("aria-label", text);
		this.load.replaceChildren(
			h("h2", {}, "Load"),
			describe([
				["Running", words(latest.running)],
				["Waiting", words(latest.waiting)],
				["Open requests", words(latest.open)],
				["KV cache", latest.cache == null ? "–" : `${(latest.cache * 100).toFixed(1)} %`],
				["Tokens/s now", rate(rates.at(-1) ?? 0)],
				["First token, mean", seconds(watch.mean("first"))],
				["Gap, mean", seconds(watch.mean("gap"))],
			]),
			h("figure", {}, spark, h("figcaption", {}, text)),
		);
	}
}

const restarts = ({ recent, most, window_seconds, continued_calls, down_seconds }) =>
	`${recent} of ${most} in ${window_seconds / 60} minutes; ${continued_calls} calls continued, ${down_seconds.toFixed(1)} s without an engine`;

const copyText = ({ number, state, gpus }) => `${number} ${state}${gpus.length ? ` (GPU ${gpus.join(", ")})` : ""}`;

function modelCard(model, state) {
	const title = [model.name, model.version].filter(Boolean).join(":");
	const health = state.health.models[title];
	const startup = Object.entries(model.startup).map(([phase, seconds]) => `${phase} ${seconds.toFixed(1)} s`);
	const reason = health?.reason ?? model.reason;
	return card(
		`Model ${title}`,
		describe([
			[
				"Health",
				h("strong", { class: model.state === "ready" ? "good" : "bad" }, model.state),
				` (/ping: ${state.health.status}${health ? `, ${health.status}` : ""})`,
			],
			...(reason ? [["Reason", h("span", { class: "bad" }, reason)]] : []),
			["Engine", [model.engine, model.engine_version].filter(Boolean).join(" ")],
			["Weights", model.model_id],
			["/invocations", `LMI ${model.contract}${model.tgi_compat ? ", TGI-compatible" : ""}`],
			["OpenAI's name", model.names.join(", ")],
			["Context", model.context == null ? "–" : `${model.context} tokens`],
			["Kind", words(model.kind)],
			["Chat template", model.chat ? "yes" : "no"],
			["Images", model.images ? "yes" : "no"],
			["Start", startup.join(", ") || "–"],
			...(model.copies.length > 1 ? [["Copies", model.copies.map(copyText).join(", ")]] : []),
			...(model.restarts ? [["Engine restarts", restarts(model.restarts)]] : []),
			["Slipway", state.version],
		]),
	);
}

function adapterCard(state) {
	const adapters = state.models.flatMap((model) =>
		model.adapters.map((adapter) => [adapter.name, model.name, adapter.src ?? "–", adapter.pinned ? "pinned" : ""]),
	);
	if (!adapters.length) return [];
	return [card("Adapters", table(["Name", "Model", "Source", ""], adapters, { "aria-label": "Adapters" }))];
}

function settingsCards(state) {
	if (!state.management)
		return [
			card(
				"Settings",
				h(
					"p",
					{ class: "hint" },
					"The management API has an address of its own, and so have the settings: /console/state there.",
				),
			),
		];
	const reports = state.models.map((model) => [model.name, model.settings]);
	if (state.settings) reports.unshift(["server", state.settings]);
	return reports.map(([name, report]) => settingsCard(reports.length > 1 ? `Settings of ${name}` : "Settings", report));
}

function settingsCard(title, { settings, aliases, warnings }) {
	const rows = settings.map(({ name, value, source, note }) => [
		name,
		words(value),
		note ? `${source} (${note})` : source,
	]);
	const shown = table(["Setting", "Value", "Source"], rows, { "aria-label": title });
	const filter = h("input", {
		type: "search",
		placeholder: "Find a setting",
		"aria-label": "Find a setting",
		autocomplete: "off",
	});
	const given = h("input", { type: "checkbox" });
	const apply = () => {
		const text = filter.value.toLowerCase();
		[...shown.querySelectorAll("tbody tr")].forEach((row, place) => {
			row.hidden =
				!row.textContent.toLowerCase().includes(text) || (given.checked && settings[place].source === "default");
		});
	};
	filter.addEventListener("input", apply);
	given.addEventListener("change", apply);
	return card(
		title,
		h("div", { class: "row start" }, filter, h("label", { class: "check" }, given, h("span", {}, "Without defaults"))),
		shown,
		...aliases.map(({ variable, of, setting }) => h("p", { class: "hint" }, `${variable} (${of}) is ${setting}`)),
		...warnings.map((warning) => h("p", { class: "problem" }, warning)),
	);
}
