"""Constraints and adapters are obeyed or refused, on every route, also in bodies that JSON readers disagree about."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle
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
    COMPLETIONS,
    LMI,
    MESSAGE,
    MESSAGES,
    OPENAI,
    RESPONSE,
    RESPONSES,
    TGI,
    VLLM_NAMES,
    Check,
    Fields,
    Route,
    is_json,
    text_in,
    typed,
)
from tests.live.constraint_cases import ENFORCED, HAPPY, OF_TOKENS, ROUTES
from tests.live.lora import make_adapter
from tests.live.server import Server, serving

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
ADAPTER, OTHER_ADAPTER, SCALE = "red", "green", 3.0
WITHOUT = "without"
PLAIN, SPACED = "as it is", "with white space"

OTHER_REGEX = "[a-c]{4}"
OTHER_SCHEMA = {
    "type": "object",
    "properties": {"m": {"type": "integer", "minimum": 6, "maximum": 9}},
    "required": ["m"],
    "additionalProperties": False,
}
OTHERS: Fields = {
    "structured_outputs": {"regex": OTHER_REGEX},
    "guided_decoding": {"regex": OTHER_REGEX},
    "guided_json": OTHER_SCHEMA,
    "guided_regex": OTHER_REGEX,
    "guided_choice": ["up"],
    "guided_grammar": 'root ::= "up"',
    "grammar": typed("regex", value=OTHER_REGEX),
    "response_format": typed("regex", value=OTHER_REGEX),
    "text": {"format": typed("json_schema", name="x", schema=OTHER_SCHEMA)},
    "output_config": {"format": typed("json_schema", schema=OTHER_SCHEMA)},
    "response_pool": ["up"],
    "json_format": {"m": "boolean"},
}
"""Another value for each name of a form. No text obeys both it and the form."""


def is_other(text: str) -> bool:
    """Return True if a text obeys one of the other values."""
    return text == "up" or re.fullmatch(OTHER_REGEX, text) is not None or text.startswith('{"m":')


def is_either(text: str) -> bool:
    return is_json(text) or is_other(text)


@dataclass(frozen=True)
class Request:
    """A request before it becomes bytes."""

    document: Fields
    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""


Way = Callable[[Request, str], Request]
"""Names an adapter in a request; a header and a query name `ADAPTER` always, since they come once."""


def _in_header(request: Request, _: str) -> Request:
    return replace(request, headers={HEADER: ADAPTER})


def _in_body(name: str) -> Way:
    return lambda request, adapter: replace(request, document={**request.document, name: adapter})


def _in_parameters(request: Request, adapter: str) -> Request:
    parameters = {**request.document["parameters"], "adapter_id": adapter}
    return replace(request, document={**request.document, "parameters": parameters})


def _in_sampling_parameters(request: Request, adapter: str) -> Request:
    values = {**json.loads(request.document["sampling_parameters"]), "lora_name": adapter}
    return replace(request, document={**request.document, "sampling_parameters": json.dumps(values)})


def _in_query(request: Request, _: str) -> Request:
    return replace(request, query=f"?adapter={ADAPTER}")


def _for_each_input(request: Request, adapter: str) -> Request:
    inputs = request.document["inputs"]
    adapters = [adapter] * (len(inputs) if isinstance(inputs, list) else 1)
    return replace(request, document={**request.document, "adapters": adapters})


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
    **dict.fromkeys(VLLM_NAMES, HEADER_ALONE),
    **dict.fromkeys(("Triton", "Triton, streamed"), TRITONS),
    "Triton, sampling_parameters": {**HEADER_ALONE, "lora_name": _in_sampling_parameters},
}
"""The ways of naming an adapter, by route."""


@dataclass(frozen=True)
class Sent:
    """The document of a request, and those that differ from it in its form or its adapter."""

    document: Fields
    formless: Fields
    nameless: Fields
    other: Fields
    """The document with another form and another adapter, by the same names."""


def _after_nulls(document: Fields) -> bytes:
    """Write each key twice, with null at first. JSON's readers take the last."""
    fields = [json.dumps(name) + ":" + json.dumps(value) for name, value in document.items()]
    return ("{" + ",".join([*(json.dumps(name) + ":null" for name in document), *fields]) + "}").encode()


def _json_of(value: object, written: Callable[[str], str]) -> str:
    """Return the JSON of a value. `written` writes its keys."""
    if isinstance(value, dict):
        return "{" + ",".join(f'"{written(name)}":{_json_of(one, written)}' for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_json_of(one, written) for one in value) + "]"
    return json.dumps(value)


def _as_escapes(letters: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in letters)


def _escaped(document: Fields) -> bytes:
    """Write each letter of a key as an escape."""
    return _json_of(document, _as_escapes).encode()


def _keys(one: Any, another: Any) -> set[str]:
    """Return the keys with values that differ, at any depth. Of nested keys, only the deepest counts."""
    if isinstance(one, dict) and isinstance(another, dict):
        found: set[str] = set()
        for name in one.keys() | another.keys():
            if one.get(name) != another.get(name):
                found |= _keys(one.get(name), another.get(name)) or {name}
        return found
    if isinstance(one, list) and isinstance(another, list) and len(one) == len(another):
        return set().union(*map(_keys, one, another))
    return set()


def _one_letter(names: Callable[[Sent], set[str]]) -> Callable[[Sent], bytes]:
    """Write the first letter of some keys as an escape, and the other keys plainly."""

    def encode(sent: Sent) -> bytes:
        chosen = names(sent)
        return _json_of(
            sent.document, lambda name: _as_escapes(name[0]) + name[1:] if name in chosen else name
        ).encode()

    return encode


def _twice(first: Any, last: Any, *, deep: bool) -> str:
    """Return a document with both values of each key that has different ones. `deep`: only of the innermost keys."""
    if deep and isinstance(first, list) and isinstance(last, list):
        return "[" + ",".join(_twice(one, another, deep=deep) for one, another in zip(first, last, strict=True)) + "]"
    begin, end = [], []
    for name in {**first, **last}:
        values = [document[name] for document in (first, last) if name in document]
        if deep and len(values) == 2 and name == "parameters":
            begin.append(f'"{name}":{_twice(*values, deep=deep)}')
            continue
        begin.append(f'"{name}":{_json_of(values[0], str)}')
        if values[0] != values[-1]:
            end.append(f'"{name}":{_json_of(values[-1], str)}')
    return "{" + ",".join([*begin, *end]) + "}"


def _with(text: str, place: str = "") -> Callable[[Fields], bytes]:
    """Add a field that no contract knows, with this JSON as its value."""

    def encode(document: Fields) -> bytes:
        marked = {**document, "unknown": "<mark>"}
        if isinstance(document.get(place), dict):
            marked = {**document, place: {**document[place], "unknown": "<mark>"}}
        return json.dumps(marked).encode().replace(b'"<mark>"', text.encode("utf-8", "surrogatepass"))

    return encode


def _encoded(encoding: str) -> Callable[[Fields], bytes]:
    return lambda document: json.dumps(document, ensure_ascii=False).encode(encoding)


DOCUMENTS: dict[str, Callable[[Fields], bytes]] = {
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
    "keys twice": _after_nulls,
}
"""Every reader understands the first two; some refuse the others, and some read them in another way."""
OTHER_FIRST: dict[str, Callable[[Sent], bytes]] = {
    "two values, another at first": lambda sent: _twice(sent.other, sent.document, deep=False).encode(),
    "two values within, another at first": lambda sent: _twice(sent.other, sent.document, deep=True).encode(),
}
OTHER_LAST: dict[str, Callable[[Sent], bytes]] = {
    "two values, another at last": lambda sent: _twice(sent.document, sent.other, deep=False).encode(),
    "two values within, another at last": lambda sent: _twice(sent.document, sent.other, deep=True).encode(),
}
"""JSON's readers take the last value, so the answer is that to the other document."""
BODIES: dict[str, Callable[[Sent], bytes]] = {
    **{name: lambda sent, encode=encode: encode(sent.document) for name, encode in DOCUMENTS.items()},  # type: ignore[misc]
    "a letter of the form's name escaped": _one_letter(lambda sent: _keys(sent.document, sent.formless)),
    "a letter of the adapter's name escaped": _one_letter(lambda sent: _keys(sent.document, sent.nameless)),
    "a letter of the parameters' name escaped": _one_letter(lambda _: {"parameters", "sampling_parameters"}),
    **OTHER_FIRST,
    **OTHER_LAST,
}


OPENAIS_ERROR, LMIS_ERROR = {"error": {"code", "message", "param", "type"}}, {"error": None, "code": None}
LMIS_END = {**LMIS_ERROR, "generated_text": None, "details": {"finish_reason", "generated_tokens", "inputs"}}
LMIS_LIST = {**LMIS_END, "details": {"finish_reason", "generated_tokens", "inputs", "tokens"}}
LMIS_RECORD = {**LMIS_END, "token": {"error_msg", "id", "log_prob", "special_token", "text"}}
Refusal = tuple[int, Any]
"""A status, and the keys of the body: those of an object in it as well."""
OPENAIS_REFUSALS: tuple[Refusal, ...] = ((400, OPENAIS_ERROR), (404, OPENAIS_ERROR))
LMIS_REFUSALS: tuple[Refusal, ...] = tuple((424, shape) for shape in (LMIS_ERROR, LMIS_END, LMIS_LIST, LMIS_RECORD))
ANTHROPICS_REFUSALS: tuple[Refusal, ...] = ((400, {"type": None, "error": {"type", "message"}}),)
TGIS_REFUSALS: tuple[Refusal, ...] = ((422, {"error": None, "error_type": None}),)
HAPPYS_REFUSALS: tuple[Refusal, ...] = ((422, {"detail": None}),)
TRITONS_REFUSALS: tuple[Refusal, ...] = ((400, {"error": None}),)
TGIS_TEXT = "Failed to parse the request body as JSON: "


@dataclass(frozen=True)
class Target:
    """A route, the forms for its answers, the ways to name an adapter, and its refusals."""

    route: Route
    forms: Mapping[str, tuple[Fields, Check]]
    ways: Mapping[str, Way]
    refusals: tuple[Refusal, ...]
    others: Fields = field(default_factory=lambda: OTHERS)
    """Another value for each name of its forms."""

    def request(self, form: str, way: str, adapter: str = ADAPTER, *, other: bool = False) -> Request:
        """A request of a form that names an adapter in a way, or of another form by the same names."""
        fields: Fields = {} if form == WITHOUT else self.forms[form][0]
        if other:
            fields = {name: self.others[name] for name in fields}
        request = Request(self.route.body(fields))
        return request if way == WITHOUT else self.ways[way](request, adapter)

    def sent(self, form: str, way: str) -> Sent:
        """The documents of a request."""
        return Sent(
            self.request(form, way).document,
            self.request(WITHOUT, way).document,
            self.request(form, WITHOUT).document,
            self.request(form, way, OTHER_ADAPTER, other=True).document,
        )


def _function(call: Any) -> str:
    arguments: str = call["function"]["arguments"]
    return arguments


def _first_arguments(document: Any) -> str:
    return _function(document["choices"][0]["message"]["tool_calls"][0])


def _streamed_arguments(chunks: list[Any]) -> str:
    calls = [
        call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or []
    ]
    return "".join(call["function"].get("arguments") or "" for call in calls if call["index"] == 0)


def _response_arguments(document: Any) -> str:
    return next(item["arguments"] for item in document["output"] if item["type"] == "function_call")


def _streamed_response_arguments(events: list[Any]) -> str:
    pieces = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    return "".join(event["delta"] for event in pieces if event["output_index"] == pieces[0]["output_index"])


def _message_arguments(document: Any) -> str:
    return next(json.dumps(item["input"]) for item in document["content"] if item["type"] == "tool_use")


def _streamed_message_arguments(events: list[Any]) -> str:
    pieces = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    return "".join(event["delta"]["partial_json"] for event in pieces if event["index"] == pieces[0]["index"])


def _streamed_message(events: list[Any]) -> str:
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")


def _asking(tools: list[Fields], **members: Any) -> Callable[[Fields], Fields]:
    return lambda fields: {"model": "tgi", "temperature": 0, "tools": tools, **members, **fields}


def _batch(fields: Fields) -> Fields:
    return {**ROUTES["chat"].body(fields), "messages": [MESSAGES, MESSAGES]}


SCHEMAS = {"f": CLOSED, "g": OTHER_SCHEMA}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
ASKED = {"messages": MESSAGES, "max_tokens": 64}
FORMS = {
    name: {form: case for form, case in cases.items() if form not in OF_TOKENS} for name, cases in ENFORCED.items()
}
"""Forms of the whole text. An answer in the words of an adapter follows the others without effort."""
REFUSALS: dict[str, tuple[Refusal, ...]] = {
    **dict.fromkeys((*OPENAI, *RESPONSE), OPENAIS_REFUSALS),
    **dict.fromkeys(MESSAGE, ANTHROPICS_REFUSALS),
    **dict.fromkeys(("LMI's chat", "LMI's chat, streamed"), ((424, LMIS_ERROR),)),
    "LMI's completions": ((424, LMIS_ERROR), *OPENAIS_REFUSALS),
    **dict.fromkeys(LMI, LMIS_REFUSALS),
    **dict.fromkeys(TGI, TGIS_REFUSALS),
    **dict.fromkeys(VLLM_NAMES, TRITONS_REFUSALS),
    **dict.fromkeys(HAPPY, HAPPYS_REFUSALS),
}
TARGETS = {name: Target(route, FORMS[name], WAYS[name], REFUSALS[name]) for name, route in ROUTES.items()}
TARGETS |= {
    "chats": replace(
        TARGETS["chat"],
        route=Route(f"{CHAT}/batch", _batch, lambda document: document["choices"][1]["message"]["content"] or ""),
    ),
    "messages, streamed": replace(
        TARGETS["messages"],
        route=Route(
            "/v1/messages",
            lambda fields: {**ROUTES["messages"].body(fields), "stream": True},
            _streamed_message,
            stream=True,
        ),
    ),
}


def _alias(name: str, path: str, *forms: str) -> Target:
    """Another address of a route, with a few of its forms."""
    target = TARGETS[name]
    return replace(
        target,
        route=replace(target.route, path=path),
        forms={form: target.forms[form] for form in forms},
    )


SOME_FORMS = ("guided_regex", "response_format: json_schema")
ALIASES = {
    "OpenAI's chat": _alias("chat", f"/openai{CHAT}", *SOME_FORMS),
    "OpenAI's completions, streamed": _alias("completions, streamed", f"/openai{COMPLETIONS}", *SOME_FORMS),
    "OpenAI's responses": _alias("responses", f"/openai{RESPONSES}", "guided_regex", "text.format: json_schema"),
    "OpenAI's messages": _alias("messages", "/openai/v1/messages", "output_config.format"),
    "invoke": _alias("LMI", "/models/model/invoke", *SOME_FORMS),
    "invoke, a chat": _alias("LMI's chat", "/models/model/invoke", *SOME_FORMS),
    "predictions": _alias("LMI, streamed", "/predictions/model", *SOME_FORMS),
    "predictions of a version": _alias("LMI's completions", "/predictions/model/1", *SOME_FORMS),
    "Triton, a version": _alias("Triton", "/v2/models/model/versions/1/generate", *SOME_FORMS),
    "Triton, a version, streamed": _alias(
        "Triton, streamed", "/v2/models/model/versions/1/generate_stream", *SOME_FORMS
    ),
}
"""Other addresses of the same routes."""
EVERY = {**TARGETS, **ALIASES}
CONVERSATIONS = [name for name in EVERY if any(word in name for word in ("chat", "message", "response"))]
"""Those that a parser of reasoning reads; tests/live/test_reasoning_constraints_live.py has the others."""


def _chooses(every: str, named: Fields, other: Fields) -> tuple[Mapping[str, tuple[Fields, Check]], Fields]:
    """The forms of a choice of tools, and the other choice."""
    return {
        "any": ({"tool_choice": every}, is_either),
        "one": ({"tool_choice": named}, is_json),
    }, {"tool_choice": other}


def _tool(
    name: str, route: Route, chosen: tuple[Mapping[str, tuple[Fields, Check]], Fields], *, streamed: Any = None
) -> dict[str, Target]:
    """A route on which a tool can be forced, and the same streamed."""
    forms, others = chosen
    whole = replace(TARGETS[name], route=route, forms=forms, others=others)
    stream = replace(route, body=lambda fields: {**route.body(fields), "stream": True}, text=streamed, stream=True)
    return {name: whole, f"{name}, streamed": replace(whole, route=stream)}


CHATS_TOOLS: list[Fields] = [{"type": "function", "function": function} for function in FUNCTIONS]
TOOLS = {
    **_tool(
        "chat",
        Route(CHAT, _asking(CHATS_TOOLS, **ASKED), _first_arguments),
        _chooses("required", *({"type": "function", "function": {"name": name}} for name in SCHEMAS)),
        streamed=_streamed_arguments,
    ),
    **_tool(
        "responses",
        Route(
            RESPONSES,
            _asking(
                [{"type": "function", **function} for function in FUNCTIONS], input="How many?", max_output_tokens=64
            ),
            _response_arguments,
        ),
        _chooses("required", *({"type": "function", "name": name} for name in SCHEMAS)),
        streamed=_streamed_response_arguments,
    ),
    **_tool(
        "messages",
        Route(
            "/v1/messages",
            _asking([{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()], **ASKED),
            _message_arguments,
        ),
        _chooses({"type": "any"}, *({"type": "tool", "name": name} for name in SCHEMAS)),
        streamed=_streamed_message_arguments,
    ),
}
"""Routes on which a tool can be forced, if the server has a parser for it; the text is that of its arguments."""


def _post(server: Server, target: Target, request: Request, content: bytes | None = None) -> httpx.Response:
    return server.client.post(
        target.route.path + request.query,
        content=json.dumps(request.document).encode() if content is None else content,
        headers={"content-type": "application/json", **request.headers},
    )


def _text(target: Target, response: httpx.Response) -> str:
    """Return the text of an answer. The text of a refusal, or of an answer without one, is empty."""
    try:
        return text_in(target.route, response)
    except (KeyError, IndexError, StopIteration, TypeError):
        return ""


def _shape(document: Any) -> Any:
    """Return the keys of an object, and of the objects in it."""
    if not isinstance(document, dict):
        return None
    return {name: set(value) if isinstance(value, dict) else None for name, value in document.items()}


def _is_refused(target: Target, response: httpx.Response) -> bool:
    """Return True if the response is an error in the contract's form, with a status that blames the client."""
    status, content = response.status_code, response.text
    if target.refusals is TGIS_REFUSALS and content.startswith(TGIS_TEXT):
        return status == 400
    if status == 200 and target.route.stream:  # an error that is the first event has the status of a stream
        first = content.removeprefix("data:").split("\n\n")[0]
        shapes = [shape for _, shape in target.refusals]
    else:
        first, shapes = content, [shape for expected, shape in target.refusals if expected == status]
    try:
        return _shape(json.loads(first)) in shapes
    except ValueError:
        return False


def _responses(server: Server, target: Target, form: str, way: str) -> tuple[dict[str, httpx.Response], httpx.Response]:
    """Return the responses by body, to each body that differs from the plain one, and to the other document."""
    request, sent = target.request(form, way), target.sent(form, way)
    plain = BODIES[PLAIN](sent)
    known = {plain, _json_of(sent.document, str).encode()}
    contents: dict[str, bytes] = {}
    for name in [name for name in BODIES if name != PLAIN]:
        content = BODIES[name](sent)
        if content not in known:
            known.add(content)
            contents[name] = content
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        other = clients.submit(_post, server, target, replace(request, document=sent.other))
        found = clients.map(lambda content: _post(server, target, request, content), (plain, *contents.values()))
        return dict(zip((PLAIN, *contents), found, strict=True)), other.result()


def _faults(server: Server, target: Target, form: str, way: str) -> Iterator[str]:
    """Yield the bodies with answers that disobey and are no refusals."""
    obeys = bool if form == WITHOUT else target.forms[form][1]
    responses, other = _responses(server, target, form, way)
    expected, of_other = _text(target, responses[PLAIN]), _text(target, other)
    if form != WITHOUT and not is_other(of_other):
        yield f"the other: {of_other!r} of {other.status_code} {other.text[:300]}"
    for body, response in responses.items():
        if body not in (PLAIN, SPACED) and _is_refused(target, response):
            continue
        text = _text(target, response)
        if body in OTHER_LAST:
            if text != of_other:
                yield f"{body}: {text!r} instead of {of_other!r}"
        elif response.status_code != 200 or not obeys(text):
            yield f"{body}: {text!r} of {response.status_code} {response.text[:300]}"
        elif text != expected:
            yield f"{body}: {text!r} instead of {expected!r}"


def _wrong(server: Server, target: Target) -> Iterator[str]:
    """Yield the forms that a plain request does not enforce. The ways to name an adapter take turns."""
    cases = list(zip(target.forms, cycle([WITHOUT, *target.ways])))
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        found = clients.map(lambda case: _post(server, target, target.request(*case)), cases)
        for (form, way), response in zip(cases, found, strict=True):
            text = _text(target, response)
            if not target.forms[form][1](text):
                yield f"{form}, {way}: {text!r} of {response.status_code} {response.text[:300]}"


def _started(directory: Path, options: dict[str, object], **more: object) -> Iterator[Server]:
    for seed, name in enumerate((ADAPTER, OTHER_ADAPTER), start=1):
        make_adapter(directory / "model" / "adapters" / name, Path(str(options["model_id"])), seed, scale=SCALE)
    lora = {"rolling_batch": "vllm", "enable_lora": "true", "max_lora_rank": 8, "max_loras": 2}
    with serving(directory, **{**options, **lora, **more}) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    yield from _started(tmp_path_factory.mktemp("plain"), small_options)


@pytest.fixture(scope="module")
def parsing(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """A server with parsers of reasoning and of tools.

    The sample model never reasons, and no constrained answer does with this parser (docs/constraints.md).
    """
    parsers = {"reasoning_parser": "granite", "tool_call_parser": "hermes", "enable_auto_tool_choice": "true"}
    yield from _started(tmp_path_factory.mktemp("parsing"), small_options, **parsers)


few = settings(
    max_examples=1,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""An example has a request for each body. The tests that draw nothing have each form and each adapter."""


def _assert_named(server: Server, target: Target) -> None:
    requests = [target.request(WITHOUT, way) for way in (WITHOUT, *target.ways)]
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        base, *texts = (_text(target, one) for one in clients.map(lambda one: _post(server, target, one), requests))
    assert len(set(texts)) == 1
    assert texts[0] not in ("", base)
    assert base


def _assert_obeyed(server: Server, target: Target) -> None:
    text = _text(target, _post(server, target, target.request(WITHOUT, WITHOUT)))
    assert not any(check(text) for _, check in target.forms.values()), f"{text!r} obeys a form that nobody asked for"
    wrong = list(_wrong(server, target))
    assert not wrong, "\n".join(wrong)


def _assert_no_fault(server: Server, target: Target, data: st.DataObject, *more: str) -> None:
    form = data.draw(st.sampled_from([*more, *target.forms]), "form")
    way = data.draw(st.sampled_from([WITHOUT, *target.ways]), "adapter")
    faults = list(_faults(server, target, form, way))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", EVERY)
def test_every_way_of_naming_an_adapter_names_it(plain: Server, name: str) -> None:
    _assert_named(plain, EVERY[name])


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_every_way_of_naming_an_adapter_names_it_with_parsers(parsing: Server, name: str) -> None:
    _assert_named(parsing, TARGETS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_form_is_obeyed_with_and_without_an_adapter(plain: Server, name: str) -> None:
    _assert_obeyed(plain, EVERY[name])


@pytest.mark.long
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_form_is_obeyed_where_the_model_might_reason(parsing: Server, name: str) -> None:
    _assert_obeyed(parsing, EVERY[name])


@few
@given(data=st.data())
@pytest.mark.parametrize("name", EVERY)
def test_an_answer_obeys_or_the_request_is_refused(plain: Server, name: str, data: st.DataObject) -> None:
    _assert_no_fault(plain, EVERY[name], data, WITHOUT)


@pytest.mark.long
@few
@given(data=st.data())
@pytest.mark.parametrize("name", TARGETS)
def test_an_answer_obeys_with_parsers_of_reasoning_and_tools(parsing: Server, name: str, data: st.DataObject) -> None:
    _assert_no_fault(parsing, TARGETS[name], data, WITHOUT)


@pytest.mark.long
@pytest.mark.parametrize("name", TOOLS)
def test_each_choice_of_a_tool_calls_it(parsing: Server, name: str) -> None:
    _assert_obeyed(parsing, TOOLS[name])


@pytest.mark.long
@few
@given(data=st.data())
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_that_has_to_be_called_is_called(parsing: Server, name: str, data: st.DataObject) -> None:
    _assert_no_fault(parsing, TOOLS[name], data)
