// The page: one prompt, one or two requests, their results, and the server's state.

import { $, h } from "./dom.js";
import { Exchange } from "./exchange.js";
import { RequestForm } from "./form.js";
import { call, useKey } from "./key.js";
import { Result } from "./result.js";
import { PROMPT_FIELDS, resolver } from "./contracts.js";
import { showDifferences } from "./differences.js";
import { ServerView, Watch, statusLine } from "./server.js";

const base = new URL("..", import.meta.url); // the server's root, also below a proxy's prefix

const page = {
	document: { paths: {}, components: { schemas: {} } },
	state: { models: [], endpoints: [], single: true, management: true, health: { status: 0, models: {} } },
	help: {},
	forms: [],
	results: [],
	running: [],
};

const chosenMode = () => $("[name=mode]:checked").value;

// The prompt

function numberMessages() {
	[...$("#messages").children].forEach((item, place) => {
		$("select", item).ariaLabel = `Role of message ${place + 1}`;
		$("textarea", item).ariaLabel = `Message ${place + 1}`;
		$("button", item).ariaLabel = `Remove message ${place + 1}`;
	});
}

function addMessage(role, content) {
	const select = h("select", {}, ...["system", "user", "assistant"].map((name) => h("option", {}, name)));
	select.value = role;
	const text = h("textarea", { rows: "2", spellcheck: "false" });
	text.value = content;
	const remove = h("button", { type: "button" }, "Remove");
	const item = h("li", {}, h("div", { class: "row" }, select, remove), text);
	remove.addEventListener("click", () => {
		const next = item.nextElementSibling ?? item.previousElementSibling;
		item.remove();
		numberMessages();
		(next ? $("textarea", next) : $("#add-message")).focus();
		changed();
	});
	for (const control of [select, text]) control.addEventListener("input", changed);
	$("#messages").append(item);
	numberMessages();
	return text;
}

function input() {
	if (chosenMode() === "text") return { prompt: $("#prompt").value };
	const items = [...$("#messages").children];
	return { messages: items.map((item) => ({ role: $("select", item).value, content: $("textarea", item).value })) };
}

function context() {
	return { ...page, base, input, chat: chosenMode() === "chat" };
}

function changed() {
	unmarkPrompt();
	page.forms.forEach((form, place) => {
		form.preview();
		page.results[place]?.prepare(form.request());
	});
}

function setMode() {
	const chat = chosenMode() === "chat";
	$("#text-prompt").hidden = chat;
	$("#chat-prompt").hidden = !chat;
	unmarkPrompt();
	for (const form of page.forms) form.refresh();
}

function markPrompt(message) {
	const problem = $("#prompt-problem");
	problem.textContent = message;
	problem.hidden = false;
	const field = chosenMode() === "chat" ? $("#messages textarea") : $("#prompt");
	field?.setAttribute("aria-invalid", "true");
	field?.setAttribute("aria-errormessage", problem.id);
}

function unmarkPrompt() {
	$("#prompt-problem").hidden = true;
	for (const field of document.querySelectorAll(".prompt [aria-invalid]")) field.removeAttribute("aria-invalid");
}

// Requests and results

function addForm() {
	const second = page.forms.length > 0;
	const place = page.forms.length;
	const form = new RequestForm("Request", context, () => page.results[place]?.prepare(form.request()));
	const result = new Result("");
	page.forms.push(form);
	page.results.push(result);
	$("#variants").append(form.element);
	$("#results").append(result.element);
	if (second) form.copyFrom(page.forms[0]);
	else form.refresh();
}

function setCompare() {
	const two = $("#compare").checked;
	if (two && page.forms.length === 1) addForm();
	if (!two && page.forms.length === 2) {
		page.forms.pop().element.remove();
		page.results.pop().element.remove();
	}
	page.forms.forEach((form, place) => (form.title = two ? `Request ${"AB"[place]}` : "Request"));
	page.results.forEach((result, place) => {
		result.label = two ? `${"AB"[place]}: ` : "";
		result.prepare(page.forms[place].request());
	});
	$("#results").classList.toggle("two", two);
	$("#differences").hidden = !two;
	if (two) showDifferences($("#differences-content"), page.results, "");
}

let frame = 0;

function redraw() {
	frame ||= requestAnimationFrame(() => {
		frame = 0;
		for (const result of page.results) result.draw();
	});
}

async function send() {
	if (page.sending || !page.forms.length) return;
	const requests = page.forms.map((form) => form.request());
	const none = requests.findIndex((request) => !request);
	if (none >= 0) {
		page.forms[none].contract.focus();
		announce("This contract has no such request.");
		return;
	}
	page.sending = true;
	unmarkPrompt();
	for (const form of page.forms) form.unmark();
	$("#send").disabled = $("#compare").disabled = true;
	$("#stop").disabled = false;
	$("#take-answer").hidden = true;
	const prompt = input().prompt ?? "";
	announce("Sending");
	if (matchMedia("(max-width: 59.99rem)").matches) $(".output").scrollIntoView();
	page.running = requests.map((request, place) => {
		const exchange = new Exchange(request, redraw);
		page.results[place].begin(exchange, request);
		return exchange;
	});
	if (page.running.length === 2) showDifferences($("#differences-content"), page.results, prompt);
	for (const [place, exchange] of page.running.entries()) {
		if (exchange.abort.signal.aborted) exchange.state = "stopped";
		else await exchange.run();
		page.results[place].draw();
		showProblem(place);
	}
	page.sending = false;
	$("#send").disabled = $("#compare").disabled = false;
	$("#stop").disabled = true;
	if (page.running.length === 2) showDifferences($("#differences-content"), page.results, prompt);
	const last = page.running.at(-1);
	$("#take-answer").hidden = !(requests[0].chat && page.running[0].state === "done");
	for (const [place, form] of page.forms.entries()) page.results[place].prepare(form.request());
	announce(
		last.state === "failed"
			? `Failed: ${last.answer.error || last.failure}`
			: `${last.state}: ${last.figures().tokens ?? 0} tokens`,
	);
	watch.look();
}

function showProblem(place) {
	const name = page.results[place].guilty;
	if (!name) return;
	const message = page.running[place].answer.error;
	if (!page.forms[place].mark(name, message) && PROMPT_FIELDS.includes(name)) markPrompt(message);
}

function stop() {
	for (const exchange of page.running) {
		exchange.stop();
		exchange.abort.abort();
	}
}

function announce(text) {
	$("#announce").textContent = text;
}

// The server

let described = "";

async function describe() {
	const key = JSON.stringify(
		page.state.models.map((model) => [model.name, model.version, model.context != null, model.adapters.length]),
	);
	if (key === described) return;
	const reply = await call(new URL("openapi.json", base), {});
	page.document = await reply.json();
	described = key;
	const resolve = resolver(page.document);
	// Help for parameters that their own contract's description has none for: a name means the same in all.
	const note = (properties = {}) => {
		for (const [name, schema] of Object.entries(properties)) {
			if (schema.description) page.help[name] ??= schema.description;
			note(resolve(schema)?.type === "object" && name === "parameters" ? resolve(schema).properties : {});
		}
	};
	for (const name of ["LmiRequest", "TritonRequest", "HappyVllmRequest", "TgiRequest"])
		note(page.document.components.schemas[name]?.properties);
	if (!page.forms.length) addForm();
	for (const form of page.forms) form.refresh();
}

async function observed() {
	const [kind, text] = statusLine(watch);
	$("#status").dataset.state = kind;
	if ($("#status-text").textContent !== text) $("#status-text").textContent = text;
	const notice = $("#notice");
	const reasons = watch.state ? watch.state.models.map((model) => model.reason).filter(Boolean) : [];
	const trouble = !watch.reachable
		? ""
		: kind === "starting"
			? "The model is loading. Requests are refused until it is ready."
			: reasons.join("; ");
	if (notice.textContent !== trouble) notice.textContent = trouble;
	notice.hidden = !trouble;
	if (watch.state && watch.state !== page.state) {
		const asked = new URL(location.href).searchParams.getAll("endpoint"); // those of `slipway local` in front
		page.state = { ...watch.state, endpoints: [...new Set([...watch.state.endpoints, ...asked])] };
		watch.state = page.state;
		try {
			await describe();
		} catch {
			// Asked again with the next look.
		}
	}
	view.draw(watch);
}

const view = new ServerView($("#view-server"));
const watch = new Watch(base, observed);

function show() {
	const server = location.hash === "#server";
	$("#view-server").hidden = !server;
	$("#view-try").hidden = server;
	for (const [id, current] of [
		["#nav-try", !server],
		["#nav-server", server],
	]) {
		if (current) $(id).setAttribute("aria-current", "page");
		else $(id).removeAttribute("aria-current");
	}
	view.draw(watch);
	scrollTo(0, 0);
}

$("#composer").addEventListener("submit", (event) => {
	event.preventDefault();
	send();
});
$("#key").addEventListener("submit", (event) => {
	event.preventDefault();
	useKey($("#key input").value);
	changed();
	watch.look();
});
$("#stop").addEventListener("click", stop);
$("#compare").addEventListener("change", setCompare);
$("#prompt").addEventListener("input", changed);
$("#add-message").addEventListener("click", () => {
	const roles = [...$("#messages").children].map((item) => $("select", item).value);
	addMessage(roles.at(-1) === "user" ? "assistant" : "user", "").focus();
	changed();
});
$("#take-answer").addEventListener("click", () => {
	addMessage("assistant", page.running[0].answer.text);
	addMessage("user", "").focus();
	$("#take-answer").hidden = true;
	changed();
});
for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", setMode);
document.addEventListener("keydown", (event) => {
	if (event.key === "Escape" && page.sending) stop();
	else if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("#view-try").hidden) {
		event.preventDefault();
		send();
	} else if (event.key === "Enter" && event.target.type === "search") event.preventDefault();
});
addEventListener("hashchange", show);

addMessage("user", "What is the capital of France?");
setMode();
show();
watch.start();
