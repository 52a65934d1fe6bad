// The page: one prompt, one or two requests, their results, and the server's state.

import { $, $$, bytesText, h } from "./dom.js";
import { Exchange, call, useKey } from "./exchange.js";
import { RequestForm } from "./form.js";
import { History } from "./history.js";
import { Result } from "./result.js";
import { kindOf, resolver } from "./contracts.js";
import { showDifferences } from "./differences.js";
import { explained } from "./explain.js";
import { ServerView, Watch, statusLine } from "./server.js";

const base = new URL("..", import.meta.url); // The server's root, even if a proxy adds a prefix.

const page = {
	document: { paths: {}, components: { schemas: {} } },
	state: { models: [], endpoints: [], single: true, management: true, health: { status: 0, models: {} } },
	help: {},
	forms: [],
	results: [],
	running: [],
};

// The prompt, whose form depends on the first request's model

const images = new WeakMap(); // The images of each message, as data URLs.

const chosenModel = () => page.state.models[page.forms[0]?.modelPlace ?? 0];
const kind = () => kindOf(chosenModel());
const isRanker = () => ["reranker", "late interaction"].includes(kind());
const isChat = () => kind() === "generation" && $("[name=mode]:checked").value === "chat";

function numberMessages() {
	[...$("#messages").children].forEach((item, place) => {
		$("select", item).ariaLabel = `Role of message ${place + 1}`;
		$("textarea", item).ariaLabel = `Message ${place + 1}`;
		$(".add-image", item).ariaLabel = `Add an image to message ${place + 1}`;
		$("[type=file]", item).ariaLabel = `Image of message ${place + 1}`;
		$(".remove", item).ariaLabel = `Remove message ${place + 1}`;
	});
}

function dataUrl(file) {
	return new Promise((done, failed) => {
		const reader = new FileReader();
		reader.onload = () => done(reader.result);
		reader.onerror = () => failed(reader.error);
		reader.readAsDataURL(file);
	});
}

async function addImage(item, file) {
	let url;
	try {
		url = await dataUrl(file);
	} catch {
		return markPrompt(`${file.name} cannot be read.`);
	}
	const image = { url };
	const remove = h("button", { type: "button", "aria-label": `Remove ${file.name}` }, "Remove");
	const name = h("span", { class: "hint" }, `${file.name}, ${bytesText(file.size)}`);
	const line = h("p", { class: "row start image" }, name, remove);
	remove.addEventListener("click", () => {
		images.set(
			item,
			images.get(item).filter((one) => one !== image),
		);
		line.remove();
		$(".add-image", item).focus();
		changed();
	});
	images.get(item).push(image);
	item.append(line);
	changed();
}

function addMessage(role, content) {
	const select = h("select", {}, ...["system", "user", "assistant"].map((name) => h("option", {}, name)));
	select.value = role;
	const text = h("textarea", { rows: "2", spellcheck: "false" });
	text.value = content;
	const file = h("input", { type: "file", accept: "image/*", hidden: true });
	const add = h("button", { type: "button", class: "add-image" }, "Add an image");
	const remove = h("button", { type: "button", class: "remove" }, "Remove");
	const item = h("li", {}, h("div", { class: "row" }, select, add, file, remove), text);
	images.set(item, []);
	add.addEventListener("click", () => file.click());
	file.addEventListener("change", async () => {
		if (file.files.length) await addImage(item, file.files[0]);
		file.value = ""; // so that the same file may be chosen again
	});
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

// The content of a message: a text, or parts if it has images.
function contentOf(item) {
	const text = $("textarea", item).value;
	const shown = chosenModel()?.images ? images.get(item) : [];
	if (!shown.length) return text;
	return [...shown.map(({ url }) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

function input() {
	const text = $("#prompt").value;
	if (isRanker())
		return { query: text, documents: $("#documents").value.split("\n").filter((line) => line.trim()) };
	if (kind() !== "generation") {
		const second = kind() === "embedding" ? $("#second").value : "";
		return { texts: second ? [text, second] : [text] };
	}
	if (!isChat()) return { prompt: text };
	const items = [...$("#messages").children];
	return { messages: items.map((item) => ({ role: $("select", item).value, content: contentOf(item) })) };
}

// Returns the prompt, without its images, as data for `restorePrompt`.
function savedPrompt() {
	const messages = $$("#messages li").map((item) => [$("select", item).value, $("textarea", item).value]);
	const texts = ["prompt", "second", "documents"].map((id) => [id, $(`#${id}`).value]);
	const seen = $$(".prompt textarea").filter((field) => field.checkVisibility());
	return { chat: isChat(), texts: Object.fromEntries(texts), messages, asked: seen.map((one) => one.value).join("\n") };
}

function restorePrompt({ chat, texts, messages }) {
	for (const [id, text] of Object.entries(texts)) $(`#${id}`).value = text;
	$("#messages").replaceChildren();
	for (const message of messages) addMessage(...message);
	$(`[name=mode][value=${chat ? "chat" : "text"}]`).checked = true;
	setMode();
}

function context() {
	return { ...page, base, input, kind: kind(), chat: isChat() };
}

function changed() {
	unmarkPrompt();
	page.forms.forEach((form, place) => {
		form.preview();
		page.results[place]?.prepare(form.request());
	});
}

// Shows the fields that a prompt for this model needs.
function showPrompt() {
	const chat = isChat();
	const title = kind() === "generation" ? "Prompt" : isRanker() ? "Query" : "Text";
	$("#prompt-title").textContent = $("#prompt-label").textContent = title;
	$("#modes").hidden = kind() !== "generation";
	$("#text-prompt").hidden = chat;
	$("#chat-prompt").hidden = !chat;
	$("#second-prompt").hidden = kind() !== "embedding";
	$("#documents-prompt").hidden = !isRanker();
	$("#messages").classList.toggle("images", Boolean(chosenModel()?.images));
}

function setMode() {
	showPrompt();
	unmarkPrompt();
	for (const form of page.forms) form.refresh();
}

function markPrompt(message, name) {
	const problem = $("#prompt-problem");
	problem.textContent = message;
	problem.hidden = false;
	const field = isChat() ? $("#messages textarea") : $(name === "documents" ? "#documents" : "#prompt");
	field?.setAttribute("aria-invalid", "true");
	field?.setAttribute("aria-errormessage", problem.id);
}

function unmarkPrompt() {
	$("#prompt-problem").hidden = true;
	for (const field of $$(".prompt [aria-invalid]")) field.removeAttribute("aria-invalid");
}

// Requests and results

function addForm() {
	const second = page.forms.length > 0;
	const place = page.forms.length;
	const form = new RequestForm("Request", context, () => formChanged(form, place));
	const result = new Result("");
	page.forms.push(form);
	page.results.push(result);
	$("#variants").append(form.element);
	$("#results").append(result.element);
	if (second) form.restore({ ...page.forms[0].saved, written: null });
	else form.refresh();
}

function formChanged(form, place) {
	page.results[place]?.prepare(form.request());
	if (place > 0) return;
	const before = page.kind;
	page.kind = kind();
	showPrompt();
	if (before !== page.kind) for (const other of page.forms.slice(1)) other.refresh();
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

async function send(explains = false) {
	if (page.sending || !page.forms.length) return;
	const asked = page.forms.map((form) => form.request());
	const requests = asked.map((request) => (request && explains ? explained(request) : request));
	const none = requests.findIndex((request) => !request);
	if (none >= 0) {
		page.forms[none].contract.focus();
		announce("This contract has no such request.");
		return;
	}
	setSending(true);
	const calls = explains ? 1 : Math.min(1000, Math.max(1, Math.round($("#repeat").valueAsNumber) || 1));
	const [prompt, text, forms] = [savedPrompt(), input().prompt ?? "", page.forms.map((form) => form.saved)];
	announce("Sending");
	if (matchMedia("(max-width: 59.99rem)").matches) $(".output").scrollIntoView();
	for (let number = 1; number <= calls && !page.stopped; number += 1) await sendOnce(requests, text, number, calls);
	setSending(false);
	if (!explains)
		page.running.forEach((exchange, place) => history.add(forms[place], prompt, requests[place], exchange));
	const last = page.running.at(-1);
	$("#take-answer").hidden = explains || !(requests[0].chat && page.running[0].state === "done");
	for (const [place, form] of page.forms.entries()) page.results[place].prepare(form.request());
	announce(
		last.state === "failed"
			? `Failed: ${last.answer.error || last.failure}`
			: `${last.state}: ${summary(last, requests.at(-1))}`,
	);
	watch.look();
}

function setSending(sending) {
	page.sending = sending;
	page.stopped = false;
	for (const id of ["#send", "#explain", "#compare", "#repeat"]) $(id).disabled = sending;
	$("#stop").disabled = !sending;
	if (!sending) return;
	$("#take-answer").hidden = true;
	unmarkPrompt();
	for (const form of page.forms) form.unmark();
}

// Sends each request once, one after the other. A series ends after a call that fails or is stopped.
async function sendOnce(requests, prompt, number, calls) {
	page.running = requests.map((request, place) => {
		const exchange = new Exchange(request, redraw);
		page.results[place].begin(exchange, request, number);
		return exchange;
	});
	const compare = () =>
		requests.length === 2 && showDifferences($("#differences-content"), page.results, prompt);
	compare();
	for (const [place, exchange] of page.running.entries()) {
		if (exchange.abort.signal.aborted) exchange.state = "stopped";
		else await exchange.run();
		page.results[place].draw();
		if (exchange.state === "done") page.results[place].count(calls);
		else page.stopped = true;
		showProblem(place);
	}
	compare();
}

// Returns the result of an exchange in a few words, for screen readers.
function summary(exchange, request) {
	const { numbers } = exchange.answer;
	return numbers ? request.contract.said(numbers, request) : `${exchange.figures().tokens ?? 0} tokens`;
}

function showProblem(place) {
	const name = page.results[place].guilty;
	if (!name) return;
	const message = page.running[place].answer.error;
	if (!page.forms[place].mark(name, message)) markPrompt(message, name);
}

function stop() {
	page.stopped = true;
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
		page.state.models.map((model) => [model.name, model.version, model.kind, model.adapters.length]),
	);
	if (key === described) return;
	const reply = await call(new URL("openapi.json", base), {});
	page.document = await reply.json();
	described = key;
	const resolve = resolver(page.document);
	// Some contracts do not describe a parameter. The page then shows another contract's description of that name,
	// because a name means the same in all contracts.
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
	const [kind, text, load] = statusLine(watch);
	$("#status").dataset.state = kind;
	if ($("#status-text").textContent !== text) $("#status-text").textContent = text;
	$("#status-load").textContent = load;
	const notice = $("#notice");
	const reasons = watch.state ? watch.state.models.map((model) => model.reason).filter(Boolean) : [];
	const trouble = !watch.reachable
		? ""
		: kind === "starting"
			? "The model is loading. Requests are refused until it is ready."
			: kind === "restarting"
				? "The engine has died and is started again. Calls wait for it."
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
			// The page tries again at the next poll.
		}
	}
	view.draw(watch);
}

const view = new ServerView($("#view-server"));
const watch = new Watch(base, observed);

const history = new History(({ prompt, form }) => {
	location.hash = "#try";
	restorePrompt(prompt);
	page.forms[0]?.restore(form);
	$("#send").focus();
});

function show() {
	const shown = $(`#view-${location.hash.slice(1)}`) ? location.hash.slice(1) : "try";
	for (const name of ["try", "history", "server"]) {
		$(`#view-${name}`).hidden = name !== shown;
		if (name === shown) $(`#nav-${name}`).setAttribute("aria-current", "page");
		else $(`#nav-${name}`).removeAttribute("aria-current");
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
$("#explain").addEventListener("click", () => send(true));
$("#stop").addEventListener("click", stop);
$("#compare").addEventListener("change", setCompare);
for (const field of ["#prompt", "#second", "#documents"]) $(field).addEventListener("input", changed);
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
for (const radio of $$("[name=mode]")) radio.addEventListener("change", setMode);
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
