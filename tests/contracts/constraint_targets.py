"""The routes of the constraint matrix, with ways to name an adapter, refusals, and unusual JSON bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.constrained import (
    ASYNCHRONOUS,
    CHAT,
    CLOSED,
    COMPLETIONS,
    DYNAMIC,
    ENFORCED,
    HAPPY,
    LMI,
    MESSAGE,
    MESSAGES,
    OPENAI,
    RESPONSE,
    RESPONSES,
    ROUTES,
    TGI,
    VLLM_NAMES,
    Fields,
    Forms,
    Route,
    for_each,
    typed,
)

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
ADAPTER, OTHER_ADAPTER = "red", "green"
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
"""Another value for each field of a form. No text obeys both this value and the form's own value."""


@dataclass(frozen=True)
class Request:
    """A request before it is encoded."""

    document: Fields
    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""


Way = Callable[[Request, str], Request]
"""Names an adapter in a request. A header or a query always names `ADAPTER`, because a request has only one."""


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
    """The document of a request, and variants: without the form, without the adapter, or with others in their place."""

    document: Fields
    formless: Fields
    nameless: Fields
    other: Fields
    """The document with another form and another adapter, in the same fields."""


def _after_nulls(document: Fields) -> bytes:
    """Write each key twice, first with null. JSON's readers take the last value."""
    fields = [json.dumps(name) + ":" + json.dumps(value) for name, value in document.items()]
    return ("{" + ",".join([*(json.dumps(name) + ":null" for name in document), *fields]) + "}").encode()


def _json_of(value: object, written: Callable[[str], str]) -> str:
    """Return the JSON of a value. `written` encodes its keys."""
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
    """Return the keys whose values differ, at any depth. If keys are nested, only the deepest is returned."""
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
    """Write the first letter of some keys as an escape, and the other keys without escapes."""

    def encode(sent: Sent) -> bytes:
        chosen = names(sent)
        return _json_of(
            sent.document, lambda name: _as_escapes(name[0]) + name[1:] if name in chosen else name
        ).encode()

    return encode


def _twice(first: Any, last: Any, *, deep: bool) -> str:
    """Return a document with the keys of both documents. A key whose values differ occurs twice, once with each value.

    `deep`: The keys inside `parameters` occur twice, instead of `parameters` itself.
    """
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
"""Every reader understands the first two. Some readers refuse the others or read them in another way."""
OTHER_FIRST: dict[str, Callable[[Sent], bytes]] = {
    "two values, another at first": lambda sent: _twice(sent.other, sent.document, deep=False).encode(),
    "two values within, another at first": lambda sent: _twice(sent.other, sent.document, deep=True).encode(),
}
OTHER_LAST: dict[str, Callable[[Sent], bytes]] = {
    "two values, another at last": lambda sent: _twice(sent.document, sent.other, deep=False).encode(),
    "two values within, another at last": lambda sent: _twice(sent.document, sent.other, deep=True).encode(),
}
"""JSON's readers take the last value, so the reply equals the reply to the other document."""
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
"""A status, and the keys of the body. If a value is an object, its keys are given, too."""
OPENAIS_REFUSALS: tuple[Refusal, ...] = ((400, OPENAIS_ERROR), (404, OPENAIS_ERROR))
LMIS_REFUSALS: tuple[Refusal, ...] = tuple((424, shape) for shape in (LMIS_ERROR, LMIS_END, LMIS_LIST, LMIS_RECORD))
TGIS_REFUSALS: tuple[Refusal, ...] = ((422, {"error": None, "error_type": None}),)
TGIS_TEXT = "Failed to parse the request body as JSON: "
REFUSALS: dict[str, tuple[Refusal, ...]] = {
    **for_each((*OPENAI, *RESPONSE), OPENAIS_REFUSALS),
    **for_each(MESSAGE, ((400, {"type": None, "error": {"type", "message"}}),)),
    **for_each(("LMI's chat", "LMI's chat, streamed"), ((424, LMIS_ERROR),)),
    "LMI's completions": ((424, LMIS_ERROR), *OPENAIS_REFUSALS),
    **for_each((*LMI, *ASYNCHRONOUS), LMIS_REFUSALS),
    **for_each(DYNAMIC, ((424, {"code": None, "message": None, "error": None}),)),
    **for_each(TGI, TGIS_REFUSALS),
    **for_each(VLLM_NAMES, ((400, {"error": None}),)),
    **for_each(HAPPY, ((422, {"detail": None}),)),
}


@dataclass(frozen=True)
class Target:
    """A route with its forms, its ways to name an adapter, and its refusals."""

    route: Route
    forms: Forms
    ways: Mapping[str, Way]
    refusals: tuple[Refusal, ...]
    others: Fields = field(default_factory=lambda: OTHERS)
    """For each field that `forms` sets, another value."""

    def request(self, form: str, way: str, adapter: str = ADAPTER, *, other: bool = False) -> Request:
        """Return a request with this form. The request names an adapter in this way.

        `other`: its form has another value.
        """
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

    def is_refused(self, response: httpx.Response) -> bool:
        """Return True if the response is an error in the contract's form, with a status that blames the client."""
        status, content = response.status_code, response.text
        if self.refusals is TGIS_REFUSALS and content.startswith(TGIS_TEXT):
            return status == 400
        if status == 200 and self.route.stream:  # if the first event is an error, the status is still 200
            content = content.removeprefix("data:").split("\n\n")[0]
            shapes = [shape for _, shape in self.refusals]
        else:
            shapes = [shape for expected, shape in self.refusals if expected == status]
        try:
            return _shape(json.loads(content)) in shapes
        except ValueError:
            return False


def _shape(document: Any) -> Any:
    """Return the keys of an object, and of the objects in it."""
    if not isinstance(document, dict):
        return None
    return {name: set(value) if isinstance(value, dict) else None for name, value in document.items()}


BATCH = Route(f"{CHAT}/batch", lambda fields: {**ROUTES["chat"].body(fields), "messages": [MESSAGES, MESSAGES]}, str)
ALL_ROUTES = {**ROUTES, **ASYNCHRONOUS, **DYNAMIC}
TARGETS = {
    name: Target(route, ENFORCED[name], WAYS.get(name, {}), REFUSALS[name]) for name, route in ALL_ROUTES.items()
}
TARGETS["chats"] = replace(TARGETS["chat"], route=BATCH)


def _alias(name: str, path: str) -> Target:
    """Return a route under another path."""
    return replace(TARGETS[name], route=replace(TARGETS[name].route, path=path))


ALIASES = {
    "OpenAI's chat": _alias("chat", f"/openai{CHAT}"),
    "OpenAI's completions, streamed": _alias("completions, streamed", f"/openai{COMPLETIONS}"),
    "OpenAI's responses": _alias("responses", f"/openai{RESPONSES}"),
    "OpenAI's messages": _alias("messages", "/openai/v1/messages"),
    "invoke": _alias("LMI", "/models/model/invoke"),
    "invoke, a chat": _alias("LMI's chat", "/models/model/invoke"),
    "predictions": _alias("LMI, streamed", "/predictions/model"),
    "predictions of a version": _alias("LMI's completions", "/predictions/model/1"),
    "Triton, a version": _alias("Triton", "/v2/models/model/versions/1/generate"),
    "Triton, a version, streamed": _alias("Triton, streamed", "/v2/models/model/versions/1/generate_stream"),
}
"""The same routes under other paths."""


def _tools(name: str, every: Any, named: Callable[[str], Fields], tool: Callable[[str, Fields], Fields]) -> Target:
    """Return a route on which a client can force a tool call, if the model has a parser of tool calls."""
    tools = [tool("f", CLOSED), tool("g", OTHER_SCHEMA)]
    forms = {
        kind: ({"tool_choice": choice}, {"tool_choice": choice})
        for kind, choice in {"any": every, "one": named("f")}.items()
    }
    body = TARGETS[name].route.body
    route = replace(TARGETS[name].route, body=lambda fields: {**body(fields), "tools": tools})
    return replace(TARGETS[name], route=route, forms=forms, others={"tool_choice": named("g")})


TOOLS_TARGETS = {
    "chat, tools": _tools(
        "chat",
        "required",
        lambda name: {"type": "function", "function": {"name": name}},
        lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
    ),
    "responses, tools": _tools(
        "responses",
        "required",
        lambda name: {"type": "function", "name": name},
        lambda name, schema: {"type": "function", "name": name, "parameters": schema},
    ),
    "messages, tools": _tools(
        "messages",
        {"type": "any"},
        lambda name: {"type": "tool", "name": name},
        lambda name, schema: {"name": name, "input_schema": schema},
    ),
}
EVERY = {**TARGETS, **ALIASES, **TOOLS_TARGETS}
