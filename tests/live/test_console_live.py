"""The console in a real Chromium, on a real server: every contract, and every way in which a request ends.

`UPDATE_SCREENSHOTS=1 python -m pytest tests/live/test_console_live.py -k screenshots` takes docs/console.md's pictures.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from tests.live.chromium import MISSING, PROGRAM, Page
from tests.live.server import Server, stopped

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]

PROMPT = "The capital of France is"
QUESTION = "What is the capital of France?"
ENDLESS = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
STORY = "Once upon a time, there was a lighthouse keeper who"
ENDPOINT = "my-endpoint"
PICTURES = Path(__file__).parents[2] / "docs" / "console"
COLOURS = 48
RUNNING = "slipway_engine_running"
TOKENS = "12"
FORMATS = {
    "lmi": ("jsonlines", "sse", "json"),
    "openai": ("sse", "json"),
    "tgi": ("sse", "json"),
    "triton": ("sse", "json"),
    "happy_vllm": ("stream", "json"),
    "sagemaker": ("jsonlines", "json"),
}
CONTRACTS = [(contract, form) for contract, forms in FORMATS.items() for form in forms]
STREAMED = [(contract, forms[0]) for contract, forms in FORMATS.items()]
CHATS = [("lmi", "stream"), ("lmi", "json"), ("openai", "sse"), ("openai", "json"), ("sagemaker", "stream")]
GREEDY = ("lmi", "tgi", "sagemaker")
"""The contracts whose answers are greedy unless the request asks for sampling."""
ENDED = "['done', 'failed', 'stopped'].includes(document.querySelector('.phase').dataset.state)"
WIDTH = "document.documentElement.scrollWidth"
UNLABELLED = """[...document.querySelectorAll('input, select, textarea, button')].filter((one) =>
    !one.labels?.length && !one.getAttribute('aria-label') && !one.textContent.trim()).length"""
LIMIT = "[name=max_new_tokens], [name=max_tokens], [name=max_completion_tokens]"


@pytest.fixture(scope="module")
def url(sample_server: Server) -> str:
    return sample_server.url


def show(page: Page, url: str) -> None:
    page.open(f"{url}/console?endpoint={ENDPOINT}")
    page.wait_for("document.readyState === 'complete' && document.querySelector('[name=contract]')?.value")


@pytest.fixture
def refusing(shared_page: Page, url: str) -> Iterator[Page]:
    """Reload the page. A test may send requests that the server refuses, which the browser reports as errors."""
    shared_page.size(1280, 900)
    show(shared_page, url)
    yield shared_page
    assert {urlsplit(asked).netloc for asked in shared_page.requests} == {urlsplit(url).netloc}


@pytest.fixture
def page(refusing: Page) -> Iterator[Page]:
    """Reload the page. It must not call other machines, and must not cause errors or warnings."""
    yield refusing
    refusing.evaluate("0")  # collects the last errors and warnings of the browser
    assert not refusing.complaints


def choose(page: Page, contract: str, form: str, *, chat: bool = False) -> None:
    page.click(f"[name=mode][value={'chat' if chat else 'text'}]")
    page.fill("[name=contract]", contract)
    page.fill("[name=format]", form)
    assert page.evaluate("document.querySelector('[name=format]').value") == form


def greedy(page: Page, contract: str, tokens: str = TOKENS) -> None:
    page.fill(LIMIT, tokens)
    page.fill("[name=temperature]", "" if contract in GREEDY else "0")


def send(page: Page) -> None:
    page.click("#send")
    page.wait_for(f"{ENDED} && !document.querySelector('#send').disabled")


def state(page: Page) -> str:
    return str(page.evaluate("document.querySelector('.phase').dataset.state"))


def reply_with(page: Page, parts: str = "[]", kind: str = "application/json", *, breaks_off: bool = False) -> None:
    """Answer each call of the page in place of the server. `parts` are texts or bytes, as a JavaScript expression."""
    page.evaluate(
        f"""(() => {{
        const parts = {parts}.map((part) => typeof part === "string" ? new TextEncoder().encode(part) : part);
        const real = window.fetch;
        window.fetch = (url, options) => options?.method !== "POST" ? real(url, options) : Promise.resolve(new Response(
          new ReadableStream({{
            async pull(stream) {{
              if (parts.length) stream.enqueue(parts.shift());
              else if ({json.dumps(breaks_off)}) stream.error(new TypeError("network error"));
              else stream.close();
            }},
          }}), {{ headers: {{ "content-type": {json.dumps(kind)} }} }}));
        }})()"""
    )


SIZES = {"desktop": (1280, 900), "laptop": (1024, 640), "phone": (360, 720)}


@pytest.mark.parametrize("size", SIZES)
def test_the_first_click_on_send_sends_after_each_edited_parameter(page: Page, size: str) -> None:
    page.size(*SIZES[size])
    choose(page, "lmi", "json")
    for name, value in {"temperature": "0.5", "top_p": "0.9", "top_k": "5", "seed": "1", "max_new_tokens": "1"}.items():
        field = page.middle(f"[name={name}]")
        page.mouse_down(field)
        page.mouse_up(field)
        page.evaluate("document.activeElement.select()")
        page.call("Input.insertText", text=value)
        assert page.evaluate(f"document.activeElement.name === '{name}'")
        shown = "getComputedStyle(document.activeElement.closest('.parameter').querySelector('.hint')).display"
        assert page.evaluate(shown) == "block"
        before, place = page.evaluate(PLACE), page.middle("#send")
        assert page.evaluate(PLACE) == before, "Send is in the window, and scrolling to it moves nothing"
        page.mouse_down(place)
        assert page.evaluate(PLACE) == before
        sent = len([url for url in page.requests if url.endswith("/invocations")])
        if name != "max_new_tokens":  # One request is enough: a token costs 90 ms.
            page.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, x=1, y=1)
            continue
        page.mouse_up(place)
        page.wait_for(f"{ENDED} && !document.querySelector('#send').disabled")
        assert len([url for url in page.requests if url.endswith("/invocations")]) == sent + 1
    assert (state(page), page.text(".request").count('"temperature":0.5')) == ("done", 1)


PLACE = "JSON.stringify(document.querySelector('#send').getBoundingClientRect())"
CUT_OFF = """(() => {
  const measured = document.createElement("canvas").getContext("2d"), found = [];
  for (const select of document.querySelectorAll(".fields select")) {
    if (!select.checkVisibility()) continue;
    const style = getComputedStyle(select);
    measured.font = style.font;
    const arrow = 24, sides = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
    const text = select.selectedOptions[0].textContent, room = select.clientWidth - sides - arrow;
    if (measured.measureText(text).width > room) found.push(`${text}: ${measured.measureText(text).width} > ${room}`);
  }
  return found;
})()"""


@pytest.mark.parametrize("size", SIZES)
def test_no_choice_is_cut_off(page: Page, size: str) -> None:
    page.size(*SIZES[size])
    for contract, form in CONTRACTS:
        choose(page, contract, form)
        assert page.evaluate(CUT_OFF) == [], (contract, form)
    assert page.evaluate(WIDTH) == SIZES[size][0]


def test_the_history_survives_a_reload_without_keys_and_can_be_cleared(page: Page, url: str, completion: str) -> None:
    choose(page, "openai", "json")
    greedy(page, "openai")
    page.fill("#key input", SECRET)
    page.evaluate("document.querySelector('#key').requestSubmit()")
    send(page)
    page.fill("#prompt", "something else")
    page.fill("[name=contract]", "triton")
    show(page, url)
    page.evaluate("void (location.hash = '#history')")
    page.wait_for("document.querySelectorAll('.entry').length >= 1")
    assert page.text(".entry h3") == "OpenAI, JSON"
    assert page.text(".entry .asked") == PROMPT
    assert page.text(".entry .answered p") == completion
    assert SECRET not in page.evaluate("JSON.stringify(Object.values(localStorage))")
    page.click(".entry button")
    assert page.evaluate("location.hash") == "#try"
    chosen = "['contract', 'format', 'temperature'].map((name) => document.querySelector(`[name=${name}]`).value)"
    assert page.evaluate(chosen) == ["openai", "json", "0"]
    assert page.evaluate("document.querySelector('#prompt').value") == PROMPT
    page.click("#clear-history")
    show(page, url)
    assert page.evaluate("document.querySelectorAll('.entry').length") == 0


SECRET = "a-key-that-nothing-keeps"


def test_the_history_is_bounded(page: Page, url: str) -> None:
    for prompt in ("short", "long " * 20_000):
        show(page, url)
        reply_with(page)
        choose(page, "lmi", "json")
        page.fill("#prompt", prompt)
        send(page)
        kept = "JSON.parse(localStorage.getItem('slipway.history'))"
        page.evaluate(f"localStorage.setItem('slipway.history', JSON.stringify(Array(60).fill({kept}[0])))")
        show(page, url)
        reply_with(page)
        send(page)
        assert page.evaluate(f"{kept}.length") in ((50,) if prompt == "short" else range(20, 50))
        assert page.evaluate("localStorage.getItem('slipway.history').length") <= 1_000_000
    page.click("#clear-history")


IMAGE = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("body", "again"),
    [
        (json.dumps({"inputs": "Hi"}), True),
        (json.dumps({"inputs": "a" * 30_000}), False),
        (json.dumps({"inputs": "Hi", "image": IMAGE}), False),
        (json.dumps({"inputs": "Hi", "image": IMAGE}).replace("/", "\\/"), False),
    ],
)
def test_only_a_request_that_is_kept_whole_can_be_used_again(page: Page, body: str, again: bool) -> None:
    reply_with(page)
    choose(page, "lmi", "json")
    page.fill("[name=body]", body)
    send(page)
    page.evaluate("void (location.hash = '#history')")
    assert page.evaluate("document.querySelectorAll('.entry').length") == 1
    assert page.evaluate("document.querySelectorAll('.entry button').length") == again
    assert "iVBOR" not in page.evaluate("localStorage.getItem('slipway.history')")
    if again:
        page.click(".entry button")
        assert page.evaluate("document.querySelector('[name=body]').value") == body
    page.evaluate("void (location.hash = '#history')")
    page.click("#clear-history")


@pytest.mark.parametrize("kept", [{}, 1, "a", [None, 1, {}, {"at": 1, "form": {}}], [{"at": "x", "figures": {}}]])
def test_a_history_of_another_shape_stops_nothing(page: Page, url: str, kept: Any) -> None:
    page.evaluate(f"localStorage.setItem('slipway.history', JSON.stringify({json.dumps(kept)}))")
    show(page, url)
    assert page.evaluate("document.querySelectorAll('.entry').length") == 0
    reply_with(page)
    choose(page, "lmi", "json")
    send(page)
    page.evaluate("void (location.hash = '#history')")
    assert page.evaluate("document.querySelectorAll('.entry').length") == 1
    page.click("#clear-history")


def test_the_theme_is_the_systems_or_the_one_that_was_chosen(page: Page, url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.size(1280, 900)
    light = page.evaluate(ground)
    page.size(1280, 900, dark=True)
    dark = page.evaluate(ground)
    assert light != dark
    page.fill("#theme", "light")
    assert page.evaluate(ground) == light
    show(page, url)
    assert (page.evaluate(ground), page.evaluate("document.querySelector('#theme').value")) == (light, "light")
    page.size(1280, 900)
    page.fill("#theme", "dark")
    assert page.evaluate(ground) == dark
    page.fill("#theme", "")
    assert page.evaluate(ground) == light


def test_the_links_lead_to_pages_of_the_server(page: Page, sample_server: Server) -> None:
    links = page.evaluate("[...document.querySelectorAll('.links a')].map((one) => new URL(one.href).pathname)")
    assert links == ["/docs", "/metrics"]
    assert {sample_server.client.get(path).status_code for path in links} == {200}


def test_probabilities_are_shown_by_mouse_touch_and_keyboard(page: Page) -> None:
    choose(page, "openai", "json")
    greedy(page, "openai", "4")
    page.click("[name=logprobs]")
    send(page)
    said, chosen = (
        ".token-detail",
        "[...document.querySelectorAll('.text .token')].findIndex((one) => one.matches('.chosen'))",
    )
    assert page.evaluate(f"{chosen}") == -1
    page.evaluate("document.querySelector('.text').focus()")
    for key, place in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", 3), ("Home", 0)):
        page.press(key)
        assert page.evaluate(chosen) == place, key
    assert "77.1 %" in page.text(said)  # exp(-0.26)
    assert page.evaluate("document.querySelectorAll('.token-detail li').length") > 1
    page.call("Input.dispatchMouseEvent", type="mouseMoved", **page.middle(".text .token:nth-of-type(2)"))
    page.wait_for(f"{chosen} === 1")
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[page.middle(".text .token")])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.wait_for(f"{chosen} === 0")
    page.call("Emulation.setTouchEmulationEnabled", enabled=False)


def test_repeated_calls_have_percentiles(page: Page) -> None:
    choose(page, "lmi", "jsonlines")
    greedy(page, "lmi", "2")
    page.fill("#repeat", "3")
    send(page)
    assert state(page) == "done"
    rows = page.evaluate(
        "[...document.querySelectorAll('.calls tr')].map((row) => [...row.cells].map((one) => one.textContent))"
    )
    assert rows[0] == ["Calls 3 of 3", "p50", "p95"]
    figures = {row[0]: row[1:] for row in rows[1:]}
    assert figures["Tokens"] == ["2", "2"]
    middle, late = (float(text.removesuffix(" ms")) for text in figures["Total"])
    assert 0 < middle <= late
    assert len([url for url in page.requests if url.endswith("/invocations")]) == 3
    page.fill("#repeat", "1")
    send(page)
    assert page.evaluate("document.querySelector('.calls').hidden")


def test_a_request_is_explained_and_nothing_is_generated(page: Page, sample_server: Server) -> None:
    rows = "[...document.querySelectorAll('.text tr')].map((row) => [...row.cells].map((one) => one.textContent))"
    for contract, form, field in (
        ("lmi", "jsonlines", "parameters.max_new_tokens"),
        ("openai", "sse", "max_tokens"),
        ("sagemaker", "json", "parameters.max_new_tokens"),
        ("sagemaker", "jsonlines", "parameters.max_new_tokens"),
    ):
        choose(page, contract, form)
        greedy(page, contract)
        before = sample_server.metric("slipway_generated_tokens_total")
        for _ in range(5):
            page.click("#explain")
            page.wait_for(f"{ENDED} && !document.querySelector('#explain').disabled")
            assert state(page) == "done", page.text(".result")
            parameters = {row[0]: row[1:] for row in page.evaluate(rows)}
            if parameters["max_tokens"][1] != "body or default":  # The machine is so busy that the search timed out.
                break
        assert parameters["max_tokens"] == [TOKENS, f"body, {field}"]
        assert page.text(".text pre") == PROMPT
        assert sample_server.metric("slipway_generated_tokens_total") == before
    send(page)
    assert state(page) == "done"
    assert page.evaluate("document.querySelector('.text').ariaLabel") == "Generated text"


def test_the_example_of_a_schema_is_answered(page: Page) -> None:
    for contract, name in (("lmi", "response_format"), ("tgi", "grammar"), ("openai", "response_format")):
        page.click(".reset")
        choose(page, contract, "json")
        page.fill(LIMIT, "12")
        page.click(f"[data-parameter={name}] .example")
        send(page)
        assert (state(page), page.text(".text").lstrip()[:1]) == ("done", "{"), page.text(".result")


def test_the_example_of_tools_is_sent_and_a_call_is_shown(page: Page) -> None:
    choose(page, "openai", "json", chat=True)
    page.click("[data-parameter=tools] .example")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    reply = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
    reply_with(page, json.dumps([reply]))
    send(page)
    assert (state(page), page.text(".text")) == ("done", '→ weather {"city": "Paris"}')
    body = json.loads(page.text(".request").partition("\n\n")[2])
    assert body["tool_choice"] == "required"
    assert [tool["function"]["name"] for tool in body["tools"]] == ["weather"]


def test_the_body_may_be_written_by_hand_and_its_error_can_be_read_whole(refusing: Page) -> None:
    written = '{"inputs": 3, "parameters": {"top_p": 7}}'
    for size in SIZES.values():
        refusing.size(*size)
        choose(refusing, "lmi", "json")
        refusing.fill("[name=body]", written)
        send(refusing)
        assert refusing.text(".request").endswith(written)
        for part in (".error", ".error-body", ".error-message"):
            box = f"document.querySelector('{part}')"
            assert refusing.evaluate(f"{box}.hidden || {box}.scrollHeight <= {box}.clientHeight"), part
        assert refusing.text(".error-title").startswith("424")
    refusing.click(".unedit")
    refusing.fill(LIMIT, "1")
    send(refusing)
    assert state(refusing) == "done"


@pytest.fixture(scope="module")
def completion(sample_server: Server) -> str:
    text: str = sample_server.invoke(PROMPT, max_new_tokens=int(TOKENS)).json()["generated_text"]
    return text


@pytest.fixture(scope="module")
def answer(sample_server: Server) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": int(TOKENS), "temperature": 0}
    text: str = sample_server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    return text


def test_every_contract_is_shown_to_its_end(page: Page, completion: str, sample_server: Server) -> None:
    for contract, form in CONTRACTS:
        choose(page, contract, form)
        greedy(page, contract)
        send(page)
        assert state(page) == "done", page.text(".result")
        text = page.text(".text")
        assert text.removeprefix(PROMPT) == completion, (contract, form)
        figures = page.text(".figures")
        counted = form != "json" or contract in ("openai", "happy_vllm")  # the others report it only on request
        assert (f"Tokens{TOKENS}" in figures) == counted, (contract, form, figures)
        assert ("Gap, median–" in figures) == (form == "json")
        reply = page.text(".reply").partition("\n\n")[2]
        assert reply, (contract, form)
        if form == "json":
            json.loads(reply)


@pytest.mark.long
def test_every_chat_is_shown_to_its_end(page: Page, answer: str) -> None:
    page.fill("#messages textarea", QUESTION)
    for contract, form in CHATS:
        choose(page, contract, form, chat=True)
        page.fill(LIMIT, TOKENS)
        page.fill("[name=temperature]", "0")
        send(page)
        assert (state(page), page.text(".text")) == ("done", answer), (contract, form)
    page.click("#take-answer")
    assert page.evaluate("document.querySelectorAll('#messages li').length") == 3
    for contract in ("tgi", "triton", "happy_vllm"):
        page.fill("[name=contract]", contract)
        assert "OpenAI" in page.text(".contract-hint") or "no chat" in page.text(".contract-hint")


@pytest.mark.long
def test_stop_ends_the_generation_in_the_engine(page: Page, sample_server: Server) -> None:
    page.fill("#prompt", ENDLESS)
    for contract, form in STREAMED:
        choose(page, contract, form)
        greedy(page, contract, "900")
        page.click("#send")
        page.wait_for("document.querySelector('.text').textContent.length > 20")
        with stopped(sample_server.engine_process()):  # the generation cannot end before the key is pressed
            assert sample_server.metric(RUNNING) == 1, contract
            page.press("Escape")
            page.wait_for(ENDED)
            assert state(page) == "stopped"
        sample_server.wait_for_metric(RUNNING, 0)


@pytest.mark.long
def test_a_refused_parameter_is_marked(refusing: Page) -> None:
    for contract, form in CONTRACTS:
        choose(refusing, contract, form)
        refusing.fill("[name=top_p]", "7")
        send(refusing)
        assert state(refusing) == "failed", contract
        assert refusing.text(".error-body mark") == "top_p", (contract, refusing.text(".error"))
        marked = "[...document.querySelectorAll('[aria-invalid]')].map((one) => one.name).join()"
        assert refusing.evaluate(marked) == "top_p", (contract, form)
        assert "top_p" in refusing.text("[data-parameter=top_p] .problem")
        refusing.fill("[name=top_p]", "")
        assert refusing.evaluate(marked) == ""


@pytest.mark.long
@pytest.mark.parametrize("language", ["curl", "python"])
def test_the_copied_code_gives_the_same_text(page: Page, completion: str, language: str) -> None:
    codes: dict[tuple[str, str], str] = {}
    replies = {}
    for contract, form in CONTRACTS:
        choose(page, contract, form)
        greedy(page, contract)
        page.click(f".as-{language}")
        codes[contract, form] = page.text(".code")
        if language == "curl" and contract != "sagemaker":
            send(page)
            replies[contract, form] = page.text(".reply").partition("\n\n")[2]
    said = dict(zip(codes, (run_python if language == "python" else run_shell)(list(codes.values())), strict=True))
    clients = {"openai": "from openai", "tgi": "from huggingface_hub", "sagemaker": "import boto3"}
    for key, text in said.items():
        if language == "python":
            assert clients.get(key[0], "import requests") in codes[key]
            assert text.removeprefix(PROMPT) == completion, codes[key]
        elif key in replies:
            assert _constant(text) == _constant(replies[key]), codes[key]
        else:
            assert completion.split()[0] in text


RUN_ALL = """
import contextlib, io, json, sys
said = []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(compile(code, "copied", "exec"), {})
    said.append(written.getvalue())
print(json.dumps(said))
"""


def run_python(codes: list[str]) -> list[str]:
    """Return the output of each program. One process runs them all, because importing the clients takes seconds."""
    environment = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true"}
    environment.pop("HF_HUB_OFFLINE", None)  # with this variable, the hub's client calls no server at all
    said: list[str] = json.loads(_output([sys.executable, "-c", RUN_ALL], environment, json.dumps(codes)))
    return said


def run_shell(codes: list[str]) -> list[str]:
    return [_output(["bash", "-c", code], dict(os.environ)) for code in codes]


def _output(command: list[str], environment: dict[str, str], given: str = "") -> str:
    done = subprocess.run(command, input=given.encode(), capture_output=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(errors="replace")


def _constant(reply: str) -> list[str]:
    """Return a reply's records without the parts that vary: ids, times, and numbers with a decimal point."""
    records = [line.removeprefix("data:").strip() for line in reply.splitlines()]
    kept = []
    for record in records:
        if record.startswith("{"):
            document = json.loads(record)
            for name in ("id", "created"):
                document.pop(name, None)
            record = re.sub(r"-?\d+\.\d+(e-?\d+)?", "#", json.dumps(document))
        kept.append(record)
    return kept


@pytest.mark.long
def test_log_probabilities_are_shades(page: Page) -> None:
    for contract in ("lmi", "tgi", "openai", "triton"):
        for form in (FORMATS[contract][0], "json"):
            choose(page, contract, form)
            greedy(page, contract)
            if not page.evaluate("document.querySelector('.logprobs').hidden"):
                page.click("[name=logprobs]")
            send(page)
            shades = page.evaluate(
                "[...document.querySelectorAll('.text .token')].map((one) => "
                "[one.textContent, getComputedStyle(one).backgroundColor])"
            )
            page.click(".text .token")
            assert len(shades) == int(TOKENS), (contract, form, page.text(".reply"))
            assert shades[0][0].strip() == "Paris"
            assert "77.1 %" in page.text(".token-detail")  # exp(-0.26)
            assert len({colour for _, colour in shades}) > 3
            if page.evaluate("document.querySelector('[name=logprobs]').checked"):
                page.click("[name=logprobs]")


@pytest.mark.long
def test_two_requests_are_compared(page: Page, completion: str) -> None:
    choose(page, "lmi", "jsonlines")
    greedy(page, "lmi")
    page.click("#compare")
    second = ".variant:nth-child(2)"
    page.fill(f"{second} [name=contract]", "triton")
    page.fill(f"{second} [name=temperature]", "0")
    send(page)
    page.wait_for("document.querySelectorAll('#differences-content tbody tr').length === 7")
    assert page.text(".verdict") == f"The texts are equal: {len(completion)} characters."
    page.fill(f"{second} [name=min_tokens], {second} [name=max_tokens]", "5")
    send(page)
    assert page.text(".verdict").startswith("The texts part after")
    kept = page.evaluate(
        "[...document.querySelectorAll('.difference > :not(ins)')].map((one) => one.textContent).join('')"
    )
    assert kept == completion
    page.size(360, 740)
    assert page.evaluate(WIDTH) == 360
    page.click("#compare")
    assert page.evaluate("document.querySelectorAll('.result').length") == 1


@pytest.mark.long
def test_the_server_is_shown_as_it_is(page: Page, sample_server: Server) -> None:
    page.evaluate("void (location.hash = '#server')")
    page.wait_for("document.querySelectorAll('#view-server table tbody tr').length > 20")
    assert page.evaluate("scrollY") == 0
    shown = page.text("#view-server")
    assert "Health" in shown
    assert "(/ping: 200, Healthy)" in shown
    page.wait_for("document.querySelector('#view-server .line').hasAttribute('d')")  # a rate needs two measurements
    assert "1024 tokens" in shown
    rows = page.evaluate(
        "[...document.querySelectorAll('#view-server tbody tr')].map((row) => row.innerText.split('\\t'))"
    )
    assert ["option.max_model_len", "1024", "serving.properties: option.max_model_len (for the engine)"] in rows
    page.fill("#view-server [type=search]", "max_model_len")
    assert (
        page.evaluate("[...document.querySelectorAll('#view-server tbody tr')].filter((row) => !row.hidden).length")
        == 1
    )
    assert page.text("#status").startswith("model · ready")
    page.size(360, 740)
    assert page.evaluate(WIDTH) == 360


@pytest.mark.long
def test_it_can_be_used_with_the_keyboard_alone(page: Page, completion: str) -> None:
    page.size(360, 740)
    assert page.evaluate(WIDTH) == 360
    names = []
    for _ in range(30):
        page.press("Tab")
        names.append(
            page.evaluate(
                "document.activeElement.name || document.activeElement.id || document.activeElement.textContent"
            )
        )
        if names[-1] == "send":
            break
    assert {"nav-try", "nav-server", "prompt", "contract", "format", "max_new_tokens", "temperature", "send"} <= set(
        names
    )
    page.evaluate("document.querySelector('[name=max_new_tokens]').focus()")
    page.evaluate("document.querySelector('[name=max_new_tokens]').select()")
    page.call("Input.insertText", text=TOKENS)
    page.press("Enter")
    page.wait_for(f"{ENDED} && !document.querySelector('#send').disabled")
    assert page.text(".text") == completion
    page.evaluate("document.querySelector('#prompt').focus()")
    page.press("Enter", control=True)
    page.wait_for("document.querySelector('#send').disabled")
    page.wait_for(f"{ENDED} && !document.querySelector('#send').disabled")
    assert page.evaluate(UNLABELLED) == 0


@pytest.mark.long
def test_a_character_may_be_cut_and_markup_stays_text(page: Page) -> None:
    text = "<img src=x onerror=alert(1)><b>grün</b> 😀 नमस्ते &amp; <script>1</script>"
    record = json.dumps(
        {"token": {"id": 1, "text": text, "log_prob": -0.5}, "generated_text": text}, ensure_ascii=False
    )
    choose(page, "lmi", "jsonlines")
    each_byte = f"[...new TextEncoder().encode({json.dumps(record)} + '\\n')].map((byte) => new Uint8Array([byte]))"
    reply_with(page, each_byte, "application/jsonlines")
    send(page)
    assert page.text(".text") == text
    assert page.text(".reply").endswith(record + "\n")
    assert page.evaluate("document.querySelectorAll('.result img, .result b, .result script').length") == 0


WRITTEN = """window.written = 0, new MutationObserver((changes) => {
  for (const { addedNodes } of changes) for (const node of addedNodes) window.written += node.textContent.length;
}).observe(document.querySelector(".text"), {childList: true})"""
"""Counts the characters that the page writes into the answer's text. If it wrote all again, it would freeze."""


@pytest.mark.long
def test_a_long_answer_stays_quick(page: Page) -> None:
    """A stream has 4,000 tokens and their log probabilities. The page writes each of them once."""
    choose(page, "lmi", "jsonlines")
    tokens = [{"id": place, "text": f" word{place}", "log_prob": -(place % 7) / 2} for place in range(4000)]
    reply_with(page, json.dumps([json.dumps({"token": token}) + "\n" for token in tokens]), "application/jsonlines")
    page.evaluate(WRITTEN)
    send(page)
    assert page.evaluate("document.querySelectorAll('.text .token').length") == 4000
    assert page.text(".text").endswith("word3998 word3999")
    assert page.evaluate("window.written") == len(page.text(".text"))
    page.click(".as-hex")
    assert "more than 65.5 kB" in page.text(".reply")


@pytest.mark.long
def test_an_answer_that_repeats_its_text_stays_quick(page: Page) -> None:
    """Each line of happy_vllm's stream repeats all text so far: 1,500 lines have 10 MB, and the page shows 8 MB of
    them.
    """
    choose(page, "happy_vllm", "stream")
    record = 'JSON.stringify({responses: [" longerword".repeat(place + 1)], finish_reasons: ["None"]})'
    reply_with(page, f'Array.from({{length: 1500}}, (_, place) => {record} + "\\n")', "")
    page.evaluate(WRITTEN)
    send(page)
    assert page.text(".text") == " longerword" * 1500
    assert "the first 8 MB are shown" in page.text(".reply-size")
    assert page.evaluate("window.written") == len(page.text(".text"))


@pytest.mark.long
def test_a_reply_that_breaks_off_says_so(page: Page) -> None:
    choose(page, "lmi", "jsonlines")
    record = json.dumps({"token": {"id": 1, "text": "half", "log_prob": -0.5}})
    reply_with(page, json.dumps([record + "\n"]), "application/jsonlines", breaks_off=True)
    send(page)
    assert (state(page), page.text(".text")) == ("failed", "half")
    assert "broke off" in page.text(".error-title")


@pytest.mark.long
def test_a_server_that_is_gone_says_so(refusing: Page) -> None:
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    refusing.call("Network.emulateNetworkConditions", offline=True, **conditions)
    try:
        send(refusing)
        assert state(refusing) == "failed"
        assert refusing.text(".error-title") == "The server cannot be reached."
        refusing.wait_for("document.querySelector('#status').dataset.state === 'unreachable'")
    finally:
        refusing.call("Network.emulateNetworkConditions", offline=False, **conditions)
    refusing.wait_for("document.querySelector('#status').dataset.state === 'ready'")


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("UPDATE_SCREENSHOTS"), reason="UPDATE_SCREENSHOTS=1 takes them anew")
def test_screenshots(page: Page, sample_server: Server, sample_model: Path) -> None:
    PICTURES.mkdir(exist_ok=True)
    names = {
        str(sample_server.model_dir): "/opt/ml/model",
        str(sample_model): "SmolLM2-135M-Instruct",
        page_host(page): "localhost:8080",
    }
    page.fill("#prompt", STORY)
    choose(page, "lmi", "jsonlines")
    page.fill(LIMIT, "80")
    page.fill("[name=details]", "true")
    send(page)
    for dark in (False, True):
        page.size(1280, 800, dark=dark)
        _picture(page, f"desktop-{'dark' if dark else 'light'}", names)
    page.size(360, 720)
    page.evaluate("scrollTo(0, 0)")
    _picture(page, "phone-light", names)
    page.size(360, 720, dark=True)
    page.evaluate("document.querySelector('.output').scrollIntoView()")
    _picture(page, "phone-dark", names)
    page.size(1280, 800)
    page.click("#compare")
    page.fill(".variant:nth-child(2) [name=contract]", "openai")
    page.fill(".variant:nth-child(2) [name=temperature]", "0")
    page.fill(".variant:nth-child(2) [name=repetition_penalty]", "1.02")
    send(page)
    _picture(page, "compare", names)
    page.evaluate("void (location.hash = '#server')")
    page.wait_for("document.querySelector('#view-server .line')?.getAttribute('d')?.split('L').length > 9")
    _picture(page, "server", names)
    page.evaluate("void (location.hash = '#history')")
    page.wait_for("document.querySelectorAll('.entry').length > 2")
    _picture(page, "history", names)


def page_host(page: Page) -> str:
    return str(page.evaluate("location.host"))


def _picture(page: Page, name: str, names: dict[str, str]) -> None:
    """Take a picture of the page. `names`: the names that replace this test's addresses and paths."""
    page.evaluate(
        f"""(() => {{ const names = {json.dumps(names)}, walk = document.createTreeWalker(document.body, 4);
        while (walk.nextNode()) for (const [from, to] of Object.entries(names))
          if (walk.currentNode.data.includes(from)) walk.currentNode.data = walk.currentNode.data.replaceAll(from, to);
        return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))); }})()"""
    )
    path = PICTURES / f"{name}.png"
    page.screenshot(path)
    with contextlib.closing(Image.open(path)) as picture:
        picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
