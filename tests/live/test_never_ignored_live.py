"""Constraints and adapters are obeyed or refused, on every route, also in bodies that JSON readers disagree about."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.live.constrained import (
    AT_A_TIME,
    CHAT,
    CLOSED,
    LMI,
    MESSAGE,
    MESSAGES,
    OPENAI,
    RESPONSE,
    RESPONSES,
    TGI,
    TOKENWISE,
    VERTEX_CHAT,
    VLLM_NAMES,
    Check,
    Fields,
    Route,
    is_json,
    text_in,
)
from tests.live.lora import make_adapter
from tests.live.server import Server, serving
from tests.live.test_every_constraint_live import ENFORCED, ROUTES

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
ADAPTER, SCALE = "red", 3.0
WITHOUT = "without"
PLAIN, SPACED = "as it is", "with white space"


@dataclass(frozen=True)
class Request:
    """A request before it becomes bytes."""

    document: Fields
    headers: Mapping[str, str]
    query: str = ""


def _in_header(request: Request) -> Request:
    return Request(request.document, {HEADER: ADAPTER})


def _in_body(name: str) -> Callable[[Request], Request]:
    return lambda request: Request({**request.document, name: ADAPTER}, {})


def _in_parameters(request: Request) -> Request:
    return Request({**request.document, "parameters": {**request.document["parameters"], "adapter_id": ADAPTER}}, {})


def _in_sampling_parameters(request: Request) -> Request:
    values = {**json.loads(request.document["sampling_parameters"]), "lora_name": ADAPTER}
    return Request({**request.document, "sampling_parameters": json.dumps(values)}, {})


def _in_query(request: Request) -> Request:
    return Request(request.document, {}, f"?adapter={ADAPTER}")


def _for_each_input(request: Request) -> Request:
    inputs = request.document["inputs"]
    return Request({**request.document, "adapters": [ADAPTER] * (len(inputs) if isinstance(inputs, list) else 1)}, {})


def _in_instances(request: Request) -> Request:
    instances = [
        {**one, "parameters": {**one["parameters"], "adapter_id": ADAPTER}} for one in request.document["instances"]
    ]
    return Request({"instances": instances}, {})


Way = Callable[[Request], Request]
HEADER_ALONE: dict[str, Way] = {"header": _in_header}
OPENAIS = {**HEADER_ALONE, "model": _in_body("model")}
LMIS = {**HEADER_ALONE, "adapters": _in_body("adapters"), "query": _in_query}
LMIS_CHATS = {**LMIS, **OPENAIS}
PROMPTS = {**LMIS, "adapters, an array": _for_each_input}
TGIS = {**HEADER_ALONE, "adapter_id": _in_parameters}
TRITONS = {**HEADER_ALONE, "lora_name": _in_body("lora_name")}
WAYS: dict[str, dict[str, Way]] = {
    **dict.fromkeys((*OPENAI, *RESPONSE, *MESSAGE), OPENAIS),
    **dict.fromkeys(("LMI's chat", "LMI's chat, streamed", "LMI's completions"), LMIS_CHATS),
    **dict.fromkeys(LMI, PROMPTS),
    **dict.fromkeys(TGI, TGIS),
    "vertex": {**HEADER_ALONE, "adapter_id": _in_instances},
    **dict.fromkeys(VERTEX_CHAT, HEADER_ALONE),
    **dict.fromkeys(VLLM_NAMES, HEADER_ALONE),
    **dict.fromkeys(("Triton", "Triton, streamed"), TRITONS),
    "Triton, sampling_parameters": {**HEADER_ALONE, "lora_name": _in_sampling_parameters},
}
"""The ways of naming an adapter, by route."""


def _duplicates(first: bool) -> Callable[[Fields], bytes]:
    """Each key comes twice. JSON's readers take the last; the other value is null."""

    def encode(document: Fields) -> bytes:
        fields = [json.dumps(name) + ":" + json.dumps(value) for name, value in document.items()]
        nulls = [json.dumps(name) + ":null" for name in document]
        return ("{" + ",".join([*nulls, *fields] if first else [*fields, *nulls]) + "}").encode()

    return encode


def _escaped(document: Fields) -> bytes:
    """Each letter of a key is an escape."""

    def fields(value: object) -> str:
        if isinstance(value, dict):
            names = ("".join(f"\\u{ord(letter):04x}" for letter in name) for name in value)
            return (
                "{" + ",".join(f'"{name}":{fields(one)}' for name, one in zip(names, value.values(), strict=True)) + "}"
            )
        if isinstance(value, list):
            return "[" + ",".join(map(fields, value)) + "]"
        return json.dumps(value)

    return fields(document).encode()


def _with(text: str, place: str = "") -> Callable[[Fields], bytes]:
    """A field that no contract knows, with this JSON as its value."""

    def encode(document: Fields) -> bytes:
        marked = {**document, "unknown": "<mark>"}
        if isinstance(document.get(place), dict):
            marked = {**document, place: {**document[place], "unknown": "<mark>"}}
        return json.dumps(marked).encode().replace(b'"<mark>"', text.encode("utf-8", "surrogatepass"))

    return encode


def _encoded(encoding: str) -> Callable[[Fields], bytes]:
    return lambda document: json.dumps(document, ensure_ascii=False).encode(encoding)


BODIES: dict[str, Callable[[Fields], bytes]] = {
    PLAIN: lambda document: json.dumps(document).encode(),
    SPACED: lambda document: b" \r\n\t" + json.dumps(document, indent=3).encode() + b"\n\n",
    "escaped keys": _escaped,
    "NaN": _with("NaN"),
    "NaN in the parameters": _with("NaN", "parameters"),
    "-Infinity": _with("-Infinity"),
    "1e999": _with("1e999"),
    "an integer of 400 digits": _with("9" * 400),
    "a lone surrogate, escaped": _with('"\\ud800"'),
    "a lone surrogate, escaped, in the parameters": _with('"\\ud800"', "parameters"),
    "a lone surrogate as bytes": _with('"\ud800"'),
    "a deep value": _with("[" * 300 + "]" * 300),
    "a number with a leading zero": _with("01"),
    "a trailing comma": lambda document: json.dumps(document).encode()[:-1] + b",}",
    "a comment": lambda document: b"/* x */" + json.dumps(document).encode(),
    "more after the end": lambda document: json.dumps(document).encode() + b"{}",
    "a control character": _with('"a\x01b"'),
    "a byte order mark": _encoded("utf-8-sig"),
    "UTF-16": _encoded("utf-16"),
    "UTF-16, big": _encoded("utf-16-be"),
    "UTF-32": _encoded("utf-32"),
    "keys twice": _duplicates(first=True),
}
"""Every reader understands the first two; some refuse the others, and some read them in another way."""


@dataclass(frozen=True)
class Target:
    """A route, the forms that an answer of it can be held to, and the ways of naming an adapter."""

    route: Route
    forms: Mapping[str, tuple[Fields, Check]]
    ways: Mapping[str, Way]


def _first_arguments(document: Any) -> str:
    arguments: str = document["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    return arguments


def _streamed_arguments(chunks: list[Any]) -> str:
    calls = [
        call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or []
    ]
    return "".join(call["function"].get("arguments") or "" for call in calls)


def _response_arguments(document: Any) -> str:
    calls = [item["arguments"] for item in document["output"] if item["type"] == "function_call"]
    return "".join(calls)


def _message_arguments(document: Any) -> str:
    return "".join(json.dumps(item["input"]) for item in document["content"] if item["type"] == "tool_use")


def _asking(tools: Fields, **members: Any) -> Callable[[Fields], Fields]:
    return lambda fields: {"model": "tgi", "temperature": 0, "tools": [tools], **members, **fields}


FUNCTION = {"name": "f", "parameters": CLOSED}
CHATS_TOOL = {"type": "function", "function": FUNCTION}
CHOICES: dict[str, tuple[Fields, Check]] = {
    "required": ({"tool_choice": "required"}, is_json),
    "a function": ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, is_json),
}
ASKED = {"messages": MESSAGES, "max_tokens": 64}
FORMS = {
    name: {form: case for form, case in cases.items() if form not in ("stop", "stop_sequences", *TOKENWISE)}
    for name, cases in ENFORCED.items()
}
"""Forms of the whole text. An answer in the words of an adapter follows the others without effort."""
TARGETS = {name: Target(route, FORMS[name], WAYS[name]) for name, route in ROUTES.items()}
TOOLS = {
    "chat": Target(Route(CHAT, _asking(CHATS_TOOL, **ASKED), _first_arguments), CHOICES, WAYS["chat"]),
    "chat, streamed": Target(
        Route(CHAT, _asking(CHATS_TOOL, **ASKED, stream=True), _streamed_arguments, stream=True), CHOICES, WAYS["chat"]
    ),
    "responses": Target(
        Route(
            RESPONSES,
            _asking({"type": "function", **FUNCTION}, input="How many?", max_output_tokens=64),
            _response_arguments,
        ),
        {
            "required": ({"tool_choice": "required"}, is_json),
            "a function": ({"tool_choice": {"type": "function", "name": "f"}}, is_json),
        },
        WAYS["responses"],
    ),
    "messages": Target(
        Route("/v1/messages", _asking({"name": "f", "input_schema": CLOSED}, **ASKED), _message_arguments),
        {
            "any": ({"tool_choice": {"type": "any"}}, is_json),
            "a tool": ({"tool_choice": {"type": "tool", "name": "f"}}, is_json),
        },
        WAYS["messages"],
    ),
}
"""Routes on which a tool can be forced, if the server has a parser for it; the text is that of its arguments."""


TGIS_PATHS = {target.route.path for name, target in TARGETS.items() if name in (*TGI, *VERTEX_CHAT)}


def _send(server: Server, target: Target, fields: Fields, way: str, body: str) -> httpx.Response:
    request = Request(target.route.body(fields), {})
    if way != WITHOUT:
        request = target.ways[way](request)
    return server.client.post(
        target.route.path + request.query,
        content=BODIES[body](request.document),
        headers={"content-type": "application/json", **request.headers},
    )


def _is_refused(path: str, response: httpx.Response) -> bool:
    """Whether it is an error in the contract's form that the client is to blame for."""
    if path in TGIS_PATHS and response.text.startswith("Failed to parse the request body as JSON: "):
        return response.status_code == 400
    name = "detail" if path.startswith("/v1/generate") else "error"
    return 400 <= response.status_code < 500 and f'"{name}"' in response.text


def _faults(server: Server, target: Target, form: str, way: str, *, may_reason: bool) -> Iterator[str]:
    """The bodies whose answers disobey, and are no refusals."""
    fields, obeys = ({}, bool) if form == WITHOUT else target.forms[form]
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        sent = clients.map(lambda body: _send(server, target, fields, way, body), BODIES)
        responses = dict(zip(BODIES, sent, strict=True))
    texts = {body: text_in(target.route, response) for body, response in responses.items()}
    for body, response in responses.items():
        if body not in (PLAIN, SPACED) and _is_refused(target.route.path, response):
            continue
        # A chat whose reasoning has not ended has no content.
        if response.status_code != 200 or not (obeys(texts[body]) or (may_reason and not texts[body])):
            yield f"{body}: {texts[body]!r} of {response.status_code} {response.text[:300]}"
        elif texts[body] != texts[PLAIN]:
            yield f"{body}: {texts[body]!r} instead of {texts[PLAIN]!r}"


def _started(directory: Path, options: dict[str, object], **more: object) -> Iterator[Server]:
    adapters = directory / "model" / "adapters"
    make_adapter(adapters / ADAPTER, Path(str(options["model_id"])), 1, scale=SCALE)
    lora = {"rolling_batch": "vllm", "enable_lora": "true", "max_lora_rank": 8}
    with serving(directory, **{**options, **lora, **more}) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, object]) -> Iterator[Server]:
    yield from _started(tmp_path_factory.mktemp("plain"), engine_options)


@pytest.fixture(scope="module")
def parsing(tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, object]) -> Iterator[Server]:
    """A server with parsers of reasoning and of tools; the sample model never ends a reasoning."""
    parsers = {"reasoning_parser": "granite", "tool_call_parser": "hermes", "enable_auto_tool_choice": "true"}
    yield from _started(tmp_path_factory.mktemp("parsing"), engine_options, **parsers)


def _drawn(data: st.DataObject, target: Target, *, free: bool = True) -> tuple[str, str]:
    forms = [WITHOUT, *target.forms] if free else list(target.forms)
    return data.draw(st.sampled_from(forms), "form"), data.draw(st.sampled_from([WITHOUT, *target.ways]), "adapter")


few = settings(
    max_examples=3,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""An example has a request for each body."""


@pytest.mark.parametrize("name", TARGETS)
def test_every_way_of_naming_an_adapter_names_it(plain: Server, name: str) -> None:
    target = TARGETS[name]
    base, *texts = (text_in(target.route, _send(plain, target, {}, way, PLAIN)) for way in (WITHOUT, *target.ways))
    assert len(set(texts)) == 1
    assert texts[0] not in ("", base)


@few
@given(data=st.data())
@pytest.mark.parametrize("name", TARGETS)
def test_an_answer_obeys_or_the_request_is_refused(plain: Server, name: str, data: st.DataObject) -> None:
    form, way = _drawn(data, TARGETS[name])
    faults = list(_faults(plain, TARGETS[name], form, way, may_reason=False))
    assert not faults, "\n".join(faults)


@few
@given(data=st.data())
@pytest.mark.parametrize("name", TARGETS)
def test_an_answer_obeys_with_parsers_of_reasoning_and_tools(parsing: Server, name: str, data: st.DataObject) -> None:
    form, way = _drawn(data, TARGETS[name])
    may_reason = "messages" in TARGETS[name].route.body({}) or name in (*RESPONSE, *VERTEX_CHAT)
    faults = list(_faults(parsing, TARGETS[name], form, way, may_reason=may_reason))
    assert not faults, "\n".join(faults)


@few
@given(data=st.data())
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_that_has_to_be_called_is_called(parsing: Server, name: str, data: st.DataObject) -> None:
    form, way = _drawn(data, TOOLS[name], free=False)
    faults = list(_faults(parsing, TOOLS[name], form, way, may_reason=False))
    assert not faults, "\n".join(faults)
