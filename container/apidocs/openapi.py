"""`/openapi.json`: what is served, as OpenAPI."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from container.apidocs.schemas import SCHEMAS
from handlers.contracts.families import FAMILIES
from handlers.contracts.family import Family, Forwards, Operation
from handlers.contracts.openai.family import LOAD, UNLOAD
from handlers.model_settings import HandlerSettings, ModelSettings

_ANYTHING: dict[str, Any] = {}


def joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The operation that takes what either takes, and answers what either answers."""
    item = {**other, **one}
    item["summary"] = f"{one['summary']}; {other['summary']}"
    if tags := dict.fromkeys((*one.get("tags", ()), *other.get("tags", ()))):
        item["tags"] = list(tags)
    item["responses"] = _union(one["responses"], other["responses"], _response)
    if "requestBody" in one and "requestBody" in other:
        item["requestBody"] = {**one["requestBody"], "content": _contents(one["requestBody"], other["requestBody"])}
    return item


def either(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """A schema for what fits one of these. One that says nothing fits anything."""
    if not all(schemas):
        return _ANYTHING
    branches: list[Mapping[str, Any]] = []
    for schema in schemas:
        branches += [branch for branch in schema.get("anyOf", (schema,)) if branch not in branches]
    return dict(branches[0]) if len(branches) == 1 else {"anyOf": branches}


def _response(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    meanings = dict.fromkeys(part["description"].removesuffix(".") for part in (one, other))
    response: dict[str, Any] = {**other, **one, "description": "; ".join(meanings)}
    if content := _contents(one, other):
        response["content"] = content
    return response


def _contents(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return _union(one.get("content", {}), other.get("content", {}), _content)


def _content(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    schema = either(one.get("schema", _ANYTHING), other.get("schema", _ANYTHING))
    return {"schema": schema} if schema else {}


def _union(one: Mapping[str, Any], other: Mapping[str, Any], both: Any) -> dict[str, Any]:
    return {**other, **{key: both(value, other[key]) if key in other else value for key, value in one.items()}}


_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_SCHEMA_REFERENCE = "#/components/schemas/"


def family_paths(families: Iterable[Family], *, generates: bool) -> dict[str, dict[str, Any]]:
    """OpenAPI path items of the routes that say what they are for.

    `generates`: an engine generates, so that routes of all kinds answer.
    """
    paths: dict[str, dict[str, Any]] = {}
    for family in families:
        for route in family.routes:
            if isinstance(route, Forwards) or route.about is None:
                continue
            if not generates and any(method == "POST" for method in route.methods):
                continue
            path = _PARAMETER.sub(r"{\1}", route.path)
            for method in route.methods:
                verb = method.lower()
                item = _family_operation(family, route.about, f"{verb}_{path}", _PARAMETER.findall(route.path))
                paths.setdefault(path, {}).setdefault(verb, item)
    return paths


def _family_operation(family: Family, about: Operation, operation: str, parameters: list[str]) -> dict[str, Any]:
    item: dict[str, Any] = {
        "summary": about.summary,
        "tags": [family.name],
        "operationId": re.sub(r"\W+", "_", operation).strip("_"),
        "responses": {
            status: {"description": meaning, "content": {media_type: {"schema": schema} if schema else {}}}
            if media_type
            else {"description": meaning}
            for status, (meaning, media_type, schema) in about.answers.items()
        },
    }
    if about.request is not None:
        item["requestBody"] = {"required": True, "content": {"application/json": {"schema": about.request}}}
    if parameters:
        item["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    return item


def forwarded(families: Iterable[Family], vllm: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of vLLM's document, the path items of the routes that go there, and the schemas that these name.

    A schema that has the name of one of ours gets another.
    """
    paths: dict[str, Any] = {}
    for family in families:
        for route in family.routes:
            if not isinstance(route, Forwards):
                continue
            verbs = vllm.get("paths", {}).get(route.path.removeprefix(route.prefix), {})
            wanted = {method.lower() for method in route.methods}
            if found := {verb: _theirs(family, route, item) for verb, item in verbs.items() if verb in wanted}:
                paths.setdefault(route.path, {}).update(found)
    schemas: dict[str, Any] = {}
    for name in _reachable(paths, vllm.get("components", {}).get("schemas", {})):
        schemas[_ours(name)] = _renamed(vllm["components"]["schemas"][name])
    return _renamed(paths), schemas


def _theirs(family: Family, route: Forwards, item: dict[str, Any]) -> dict[str, Any]:
    identity = f"{route.prefix.strip('/')}_{item['operationId']}" if route.prefix else item["operationId"]
    return {**item, "operationId": identity, "tags": [family.name]}


def _reachable(content: Any, schemas: dict[str, Any]) -> dict[str, None]:
    found: dict[str, None] = {}
    todo = list(_references(content))
    while todo:
        name = todo.pop()
        if name not in found and name in schemas:
            found[name] = None
            todo.extend(_references(schemas[name]))
    return found


def _references(content: Any) -> Iterable[str]:
    if isinstance(content, dict):
        reference = content.get("$ref")
        if isinstance(reference, str) and reference.startswith(_SCHEMA_REFERENCE):
            yield reference.removeprefix(_SCHEMA_REFERENCE)
        for value in content.values():
            yield from _references(value)
    elif isinstance(content, list):
        for value in content:
            yield from _references(value)


def _renamed(content: Any) -> Any:
    if isinstance(content, list):
        return [_renamed(value) for value in content]
    if not isinstance(content, dict):
        return content
    renamed = {key: _renamed(value) for key, value in content.items()}
    reference = renamed.get("$ref")
    if isinstance(reference, str) and reference.startswith(_SCHEMA_REFERENCE):
        renamed["$ref"] = _SCHEMA_REFERENCE + _ours(reference.removeprefix(_SCHEMA_REFERENCE))
    return renamed


def _ours(name: str) -> str:
    return f"Vllm{name}" if name in SCHEMAS else name


_STATUS: dict[str, Any] = {"type": "object", "properties": {"status": {"type": "string"}}}
_REGISTRATION = (
    ("url", "Directory of the model", True),
    ("model_name", "Its name; by default the last segment of the url", False),
    ("model_version", "Its version", False),
    ("synchronous", "Whether to answer once it is loaded; true by default", False),
    ("batch_size", "Its `batch_size`", False),
    ("max_batch_delay", "Its `max_batch_delay`", False),
    ("max_idle_time", "Its `max_idle_time`", False),
    ("job_queue_size", "Its `job_queue_size`", False),
    ("min_worker", "Its `minWorkers`", False),
    ("max_worker", "Its `maxWorkers`", False),
)
_PAGE = (("limit", "Models in one answer, 100 at most", False), ("next_page_token", "Where the list goes on", False))
_SCALE = (("min_worker", "Least number of workers", False), ("max_worker", "Greatest number of workers", False))
_BY_NAME: dict[str, Any] = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}


def management_paths() -> dict[str, dict[str, Any]]:
    """OpenAPI path items; `/workflows` has the same operations under another name."""
    return {
        "/models": {
            "get": _management_operation("Models of this server", "models", _PAGE, {"200": "The list"}),
            "post": _management_operation(
                "Load a model; a JSON body may say the same as the query",
                "register_model",
                _REGISTRATION,
                {
                    "200": "It is loaded",
                    "202": "It is going to be loaded",
                    "400": "A parameter or a setting is wrong",
                    "404": "There is no such directory",
                    "409": "There is a model with this name and version",
                    "500": "It cannot be loaded",
                    "507": "Memory is short",
                },
            ),
        },
        "/models/{model}": {
            "get": _of_model("Describe a model", "describe_model", (), {"200": "Each version of it"}),
            "put": _of_model("Scale a model", "scale_model", _SCALE, {"200": "Done", "503": "It is not ready"}),
            "delete": _of_model("Unload a model", "unregister_model", (), {"200": "It is gone"}),
        },
    }


def _of_model(
    summary: str, operation: str, query: tuple[tuple[str, str, bool], ...], answers: dict[str, str]
) -> dict[str, Any]:
    item = _management_operation(summary, operation, query, {**answers, "404": "There is no such model"})
    item["parameters"].insert(0, _BY_NAME)
    return item


def _management_operation(
    summary: str, operation: str, query: tuple[tuple[str, str, bool], ...], answers: dict[str, str]
) -> dict[str, Any]:
    return {
        "summary": summary,
        "tags": ["management"],
        "operationId": operation,
        "parameters": [
            {"name": name, "in": "query", "required": required, "description": text, "schema": {"type": "string"}}
            for name, text, required in query
        ],
        "responses": {
            status: {"description": text, "content": {"application/json": {"schema": _STATUS if status < "4" else {}}}}
            for status, text in answers.items()
        },
    }


_NAME = {"type": "string", "description": "What requests call the adapter."}
_SRC = {"type": "string", "description": "A directory with adapter_config.json; a relative one is below the model's."}
_PRELOAD = {"type": "boolean", "default": True, "description": "Load it now, rather than for its first request."}
_PIN = {"type": "boolean", "default": False, "description": "Keep it in the engine's memory."}
_FIELDS = {"name": _NAME, "src": _SRC, "preload": _PRELOAD, "pin": _PIN}
_FAILURES = {
    "400": "A parameter is missing or wrong, or adapters are off",
    "404": "Unknown adapter or model",
    "409": "The name is taken, or `src` is no local directory",
    "424": "The adapter cannot be loaded",
    "507": "There is no room for it",
}


def adapter_paths() -> dict[str, Any]:
    """Paths of an OpenAPI document."""
    paths: dict[str, Any] = {}
    for prefix, model in (("", ()), ("/models/{model}", ("model",))):
        own = "_of_model" if model else ""
        adapter = (*model, "adapter")
        paths[f"{prefix}/adapters"] = {
            "get": _adapter_operation(
                "List adapters", f"adapters{own}", model, query=_query("limit", "next_page_token")
            ),
            "post": _adapter_operation("Register an adapter", f"register_adapter{own}", model, fields=_FIELDS),
        }
        paths[f"{prefix}/adapters/{{adapter}}"] = {
            "get": _adapter_operation("Describe an adapter", f"adapter{own}", adapter),
            "delete": _adapter_operation("Unregister an adapter", f"unregister_adapter{own}", adapter),
        }
        changed = {name: _FIELDS[name] for name in ("preload", "pin")}
        paths[f"{prefix}/adapters/{{adapter}}/update"] = {
            "post": _adapter_operation("Load or pin an adapter", f"update_adapter{own}", adapter, fields=changed),
        }
    for path, names in ((LOAD, ("lora_name", "lora_path")), (UNLOAD, ("lora_name",))):
        schema = {"type": "object", "required": list(names), "properties": {name: {"type": "string"} for name in names}}
        paths[path] = {
            "post": {
                "summary": f"{path.rpartition('/')[2].replace('_', ' ').capitalize()} (vLLM)",
                "operationId": path.rpartition("/")[2],
                "tags": ["adapters"],
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "Done.", "content": {"text/plain": {}}}},
            }
        }
    return paths


def _adapter_operation(
    summary: str,
    operation: str,
    path: tuple[str, ...],
    query: tuple[dict[str, Any], ...] = (),
    fields: dict[str, Any] | None = None,
) -> dict[str, Any]:
    within = tuple({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path)
    given = tuple({"name": name, "in": "query", "schema": schema} for name, schema in (fields or {}).items())
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    described: dict[str, Any] = {
        "summary": summary,
        "operationId": operation,
        "tags": ["adapters"],
        "parameters": [*within, *query, *given],
        "responses": {"200": {"description": "Done.", "content": content}}
        | {status: {"description": what} for status, what in _FAILURES.items()},
    }
    if fields is not None:
        schema = {"type": "object", "properties": fields}
        described["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return described


def _query(*names: str) -> tuple[dict[str, Any], ...]:
    return tuple({"name": name, "in": "query", "schema": {"type": "integer", "minimum": 0}} for name in names)


_REFERENCE = re.compile(r'"#/components/schemas/(\w+)"')


@dataclass(frozen=True, slots=True)
class Document:
    """An OpenAPI document, as data and as bytes."""

    content: dict[str, Any]
    json: bytes


def openapi_document(model: ModelSettings, vllm: dict[str, Any] | None = None) -> Document:
    """OpenAPI 3.1 for what this server serves with these settings.

    `vllm`: what vLLM's own server says of the routes that go to it; known once the model is loaded.
    """
    routes, theirs = forwarded(FAMILIES, vllm or {})
    paths = {**_paths(model, routes), **family_paths(FAMILIES, generates=model.handler is None)}
    for path, verbs in routes.items():
        ours = paths.get(path, {})
        paths[path] = {
            **ours,
            **{verb: joined(ours[verb], verbs[verb]) if verb in ours else verbs[verb] for verb in verbs},
        }
    schemas = _named_in(paths) | theirs
    content = {
        "openapi": "3.1.0",
        "info": {"title": f"Slipway: {model.name}", "version": version("slipway")},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    return Document(content, msgspec.json.format(msgspec.json.encode(content), indent=2))


def _named_in(content: Any) -> dict[str, Any]:
    """The schemas that something refers to, and those that they refer to."""
    found: dict[str, Any] = {}
    todo = [content]
    while todo:
        text = msgspec.json.encode(todo.pop()).decode()
        for name in _REFERENCE.findall(text):
            if name in SCHEMAS and name not in found:
                found[name] = SCHEMAS[name]
                todo.append(SCHEMAS[name])
    return {name: schema for name, schema in SCHEMAS.items() if name in found}


def _paths(model: ModelSettings, forwarded: dict[str, Any]) -> dict[str, Any]:
    inference = _inference(model, forwarded)
    return {
        "/invocations": {"post": {**inference, "operationId": "invocations"}},
        f"/predictions/{model.name}": {"post": {**inference, "operationId": "predictions"}},
        "/models/{model}/invoke": {"post": _invoke(inference)},
        **management_paths(),
        **(adapter_paths() if model.enable_lora else {}),
        "/ping": {"get": _get("Health: 200 when the model generates", "ping", "application/json", ("500", "503"))},
        "/metrics": {"get": _get("Prometheus metrics", "metrics", "text/plain")},
        "/openapi.json": {"get": _get("This document", "openapi", "application/json")},
        "/docs": {"get": _get("This document as a page to try things on", "docs", "text/html")},
        "/docs/plain": {"get": _get("The same as a page without scripts", "docs_plain", "text/html")},
    }


def _inference(model: ModelSettings, forwarded: dict[str, Any]) -> dict[str, Any]:
    if model.handler is not None:
        return _custom(model.handler)
    if model.rolling_batch == "disable":
        return _dynamic_batch()
    own = _asynchronous() if model.async_mode else _rolling_batch(model)
    for path, answer in _openai_answers(model).items():
        if (call := forwarded.get(path, {}).get("post")) is not None:
            own = joined(own, _on_lmis_routes(call, answer))
    return own


def _openai_answers(model: ModelSettings) -> dict[str, dict[str, Any]]:
    """By vLLM's route for a kind of body: what answers it here, by media type. vLLM describes no answers."""
    whole, record = "application/json", "application/jsonlines"
    completion = {whole: {"schema": _ref("OpenAIAnswer")}, "text/event-stream": {"schema": _ref("OpenAIAnswer")}}
    chat = {whole: {"schema": _ref("ChatAnswer")}, record: {"schema": _ref("ChatRecord")}}
    if model.async_mode:
        completion = chat = {whole: {"schema": _ref("OpenAIAnswer")}, record: {"schema": _ref("OpenAIAnswer")}}
    elif model.chat_format == "openai":
        chat = completion
    return {"/v1/chat/completions": chat, "/v1/completions": completion}


def _on_lmis_routes(call: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """One of vLLM's operations, as `/invocations` takes it."""
    summary = f"OpenAI's {call['summary'].removeprefix('Create ').lower()}"
    answer = {"description": summary, "content": content}
    return {"summary": summary, "requestBody": call["requestBody"], "responses": {"200": answer}}


def _custom(handler: HandlerSettings) -> dict[str, Any]:
    anything: dict[str, Any] = {"*/*": {}}
    return {
        "summary": f"Call the model's own handler ({Path(handler.entry_point).name})",
        "requestBody": {"content": anything},
        "responses": {
            "200": {"description": "Whatever the handler answers; its status may be another.", "content": anything},
            "204": {"description": "The handler returned nothing."},
            "404": _error("Unknown model", "FrontEndError"),
            "413": {"description": "The body is too large."},
            "424": _error("The handler raised an error", "HandlerError"),
            "503": _error("The queue is full, the handler crashed or hung, or the model is not ready", "FrontEndError"),
            "507": {"description": "The handler ran out of memory."},
        },
    }


def _dynamic_batch() -> dict[str, Any]:
    texts = {"schema": {"type": "array", "items": _ref("Text")}}
    return {
        "summary": "Generate text (LMI dynamic batch)",
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref("Request")}}},
        "responses": {
            "200": {
                "description": "A text for each prompt; with option.enable_streaming a record for each step.",
                "content": {"application/json": texts, "application/jsonlines": {"schema": _ref("StepRecord")}},
            },
            "404": _error("Unknown model", "FrontEndError"),
            "413": {"description": "The body is too large."},
            "424": _error("The payload or a parameter is wrong, or generation failed", "HandlerError"),
            "503": _error("The queue is full, or the model is not ready", "FrontEndError"),
        },
    }


def _asynchronous() -> dict[str, Any]:
    return {
        "summary": "Generate text (LMI asynchronous handler)",
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref("AsyncRequest")}}},
        "responses": {
            "200": {
                "description": "The answer: one document, or a record for each token.",
                "content": {
                    "application/json": {"schema": _ref("AsyncAnswer")},
                    "application/jsonlines": {"schema": _ref("AsyncRecord")},
                },
            },
            "404": _error("Unknown model", "FrontEndError"),
            "413": {"description": "The body is too large."},
            "424": _error("The payload or a parameter is wrong", "PlainError"),
            "500": _error("Generation failed", "PlainError"),
            "503": _error("The queue is full, or the model is not ready", "FrontEndError"),
        },
    }


def _rolling_batch(model: ModelSettings) -> dict[str, Any]:
    token = {"schema": _ref("StreamRecord")}
    answer = {"schema": {"type": "array", "items": _ref("Answer")} if model.tgi_compat else _ref("Answer")}
    return {
        "summary": "Generate text (LMI rolling batch)",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _ref("Request")},
                "text/plain": {"schema": {"type": "string", "description": "The prompt."}},
            },
        },
        "responses": {
            "200": {
                "description": "The answer: one document, or a record for each token.",
                "content": {"application/json": answer, "application/jsonlines": token, "text/event-stream": token},
            },
            "404": _error("Unknown model", "FrontEndError"),
            "413": {"description": "The body is too large."},
            "424": _error("The payload or a parameter is wrong, or generation failed", "RequestError"),
            "503": _error("The queue is full, or the model is not ready", "FrontEndError"),
        },
    }


def _invoke(inference: dict[str, Any]) -> dict[str, Any]:
    parameters = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {**inference, "operationId": "invoke", "parameters": parameters}


def _get(summary: str, operation: str, media_type: str, failures: tuple[str, ...] = ()) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": summary, "content": {media_type: {}}}}
    responses |= {status: {"description": "Not ready."} for status in failures}
    return {"summary": summary, "operationId": operation, "responses": responses}


def _error(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(schema)}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
