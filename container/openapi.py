"""`/openapi.json` is the API description in OpenAPI 3.1. `/docs` shows it with vLLM's copy of Swagger UI.

Contracts describe their routes as `Operation`s. vLLM's document describes the routes that vLLM's front end answers. The
descriptions of errors are derived from the replies of each contract's `refuse`.
"""

from __future__ import annotations

import html
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from engines import errors
from engines.errors import RequestError
from handlers.all_contracts import CONTRACTS
from handlers.contract import JSON, Call, Reply
from handlers.lmi.management import adapters as lmi_adapters
from handlers.lmi.openapi import ADAPTERS, MANAGEMENT, invocation
from handlers.model_config import ModelConfig
from handlers.openai.routes import ALIASED, LOAD, UNLOAD, LoadAdapterRequest, UnloadAdapterRequest, refuse_adapter
from handlers.openapi_schemas import OBJECT, STRING, Schema, either, struct
from handlers.route_declarations import ContractRoutes, GenerationRoute, InfoRoute, Operation, Route

_FOR_VLLM = ("/v1/chat/completions", "/v1/completions")  # LMI's routes accept the bodies of these routes, too.
_PARAMETER = re.compile(r"\{(\w+)(?::(\w+))?\}")
_KINDS: Mapping[str, Schema] = {"int": {"type": "integer", "minimum": 0}}
_SWAGGER = ("entrypoints", "serve", "instrumentator", "static")
_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_SCHEMAS = "#/components/schemas/"
_REFERENCE = re.compile(rf'"{_SCHEMAS}([\w.-]+)"')

# The groups of routes in the order of the page. The groups of contracts come first.
TAGS: Mapping[str, str] = {
    "lmi": "LMI and DJL-Serving: `/invocations`, which SageMaker calls. It also takes OpenAI's chats and completions.",
    "openai": "OpenAI's API as `vllm serve` has it. `/openai/v1/...` has the same routes, and accepts any `model`.",
    "anthropic": "Anthropic's messages, as `vllm serve` has them.",
    "tgi": "Hugging Face's Text Generation Inference.",
    "tei": "Hugging Face's Text Embeddings Inference, for models that make vectors, scores or classes.",
    "triton": "Triton's generate extension, and KServe's V2 protocol.",
    "happy_vllm": "happy_vllm 1.1.",
    "server": "Health, metrics, and this description.",
    "adapters": "LoRA adapters: list, load, unload.",
    "management": "Models: list, load, scale, unload.",
}
_PROMPT = "The capital of France is"
# An example request for each kind of model. The first path exists in vLLM only for this kind. The second path and the
# body form the request.
_FIRST_REQUESTS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("/v1/completions", "/invocations", {"inputs": _PROMPT, "parameters": {"max_new_tokens": 16}}),
    ("/v1/embeddings", "/v1/embeddings", {"input": _PROMPT}),
    ("/classify", "/classify", {"input": _PROMPT}),
    ("/rerank", "/rerank", {"query": "capital of France", "documents": ["Paris", "Rome"]}),
)

# For each status: its meaning, and the schemas of its body by media type.
Answers = Mapping[str, tuple[str, Mapping[str, Schema]]]
Meanings = tuple[tuple[RequestError, str], ...]

_INVALID: Meanings = ((errors.InvalidRequest(""), "The request is wrong"),)
_UNREAD: Meanings = (
    (errors.BodyTimeout(""), "The rest of the body does not arrive in time"),
    (errors.BodyTooLarge(""), "The body is too large"),
)
_UNSERVED: Meanings = (
    (errors.UnknownModel("", ""), "Unknown model"),
    (errors.NotServed(""), "The model cannot do this"),
    (errors.NotReady(""), "The model is not ready"),
)
_NOT_GENERATED: Meanings = (
    (errors.Overloaded(""), "The queue is full"),
    (errors.GenerationFailed(""), "Generation failed"),
)
_OF_ADAPTERS: Meanings = (
    *_INVALID,
    *_UNREAD,
    *_UNSERVED,
    (errors.UnknownAdapter(""), "There is no such adapter"),
    (
        errors.AdapterConflict(""),
        "The adapter's name is invalid or taken, or another change of the adapter is in progress",
    ),
    (errors.AdapterFailed(""), "The adapter cannot be loaded"),
    (errors.NoRoomForAdapter(""), "All adapters in the engine's memory are in use"),
)

_PAGES = {
    path: Operation(summary=summary, answers={"200": (summary, {kind: {}})})
    for path, summary, kind in (
        ("/ping", "Health: 200 if the model generates, else 500 or 503", JSON),
        (
            "/execution-parameters",
            "Limits for SageMaker's batch transform: simultaneous calls, and the size of a record",
            JSON,
        ),
        ("/metrics", "Prometheus metrics", "text/plain"),
        (
            "/server/blackbox",
            "Black box: stacks of all threads, calls in flight, steps of the engine, memory, settings",
            JSON,
        ),
        ("/openapi.json", "This document", JSON),
        ("/docs", "This document as a page on which routes can be tried", "text/html"),
    )
}
_VLLM_ADAPTERS = {
    path: Operation(summary=summary, request=struct(order), answers={"200": ("Done", {"text/plain": STRING})})
    for path, summary, order in (
        (LOAD, "Load a LoRA adapter (vLLM)", LoadAdapterRequest),
        (UNLOAD, "Unload a LoRA adapter (vLLM)", UnloadAdapterRequest),
    )
}


def openapi_document(config: ModelConfig, vllm: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the OpenAPI document of the server's routes.

    Args:
        config: The settings of the model.
        vllm: The OpenAPI document of vLLM's front end. It is available once the model is loaded.
    """
    vllm = vllm or {}
    forwarded = _forwarded(vllm)
    paths: dict[str, Any] = {}
    for method, path, tag, operation in _operations(config, forwarded):
        item, verb = _item(method, path, tag, operation), method.lower()
        verbs = paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})
        verbs[verb] = _joined(verbs[verb], item) if "requestBody" in verbs.get(verb, {}) else verbs.get(verb, item)
    schemas: dict[str, Any] = {}
    paths = _hoisted(paths, schemas)
    for path, verbs in forwarded.items():
        ours = paths.setdefault(path, {})
        for verb, item in verbs.items():
            ours[verb] = _joined(ours[verb], item) if verb in ours else item
    schemas |= _referred_to([paths, schemas], vllm.get("components", {}).get("schemas", {}))
    used = {tag for verbs in paths.values() for operation in verbs.values() for tag in operation["tags"]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Slipway: {config.name}",
            "version": version("slipway"),
            "description": _introduction(forwarded),
        },
        "tags": [{"name": name, "description": meaning} for name, meaning in TAGS.items() if name in used],
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _introduction(forwarded: Mapping[str, Any]) -> str:
    """Return the introduction, with an example request that suits the kind of the served model."""
    found = (request for path, *request in _FIRST_REQUESTS if path in forwarded)
    path, body = next(found, _FIRST_REQUESTS[0][1:])
    command = f"curl http://localhost:8080{path} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    return f"""The same models behind several contracts: call them with the client that you have.

A first request (put your server's address in place of `localhost:8080`):

```sh
{command}
```

With the header `X-Slipway-Explain: 1`, a generating route returns the prompt and the parameters that the engine would
get, and generates nothing. Each contract has its own statuses and bodies for errors. [Metrics](metrics) are in
Prometheus' format."""


def _operations(config: ModelConfig, forwarded: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Operation]]:
    """Yield method, path, tag and description of each route that vLLM's document does not describe.

    `openapi_document` joins routes that share a method and a path. If such routes have no body,
    `openapi_document` uses only the first route.
    """
    bodies = {path: _body_schema(forwarded[path]["post"]["requestBody"]) for path in _FOR_VLLM if path in forwarded}
    invocations = invocation(config, bodies)
    for path in ("/invocations", f"/predictions/{config.name}", "/models/{model}/invoke"):
        yield "POST", path, "lmi", invocations
    for (method, path), operation in MANAGEMENT.items():
        yield method, path, "management", operation
    if config.enable_lora:
        for (method, path), operation in ADAPTERS.items():
            yield method, path, "adapters", _with(operation, _refusals(lmi_adapters.refuse, _OF_ADAPTERS))
        for path, operation in _VLLM_ADAPTERS.items():
            yield "POST", path, "adapters", _with(operation, _refusals(refuse_adapter, _OF_ADAPTERS))
    for path, operation in _PAGES.items():
        yield "GET", path, "server", operation
    for contract in CONTRACTS:
        for route in contract.routes:
            if not isinstance(route, GenerationRoute | InfoRoute) or route.about is None:
                continue
            for method in route.methods:
                if config.handler is None or method != "POST":  # A custom handler answers only some of these routes.
                    yield method, route.path, contract.name, _with(route.about, _errors(contract, route))


def _with(about: Operation, further: Answers) -> Operation:
    """Return an operation with additional answers. The operation's own description of a status takes precedence."""
    answers = dict(about.answers)
    for status, (meaning, bodies) in further.items():
        own, described = answers.get(status, (meaning, {}))
        answers[status] = own, {**bodies, **described}
    return replace(about, answers=answers)


def _errors(contract: ContractRoutes, route: Route) -> Answers:
    """Return the errors of a route: invalid or unread requests, models that cannot answer, and failed generations."""
    meanings: Meanings = ()
    of_model = not isinstance(route, InfoRoute) or route.answer_all is None
    if "POST" in route.methods:
        meanings += _INVALID + _UNREAD
    elif of_model and "{" in route.path:
        meanings += _INVALID
    if of_model:
        meanings += _UNSERVED
    if not isinstance(route, InfoRoute):
        meanings += _NOT_GENERATED
    answers = _refusals(contract.refuse, meanings, contract.error)
    if contract.not_found is None or not any(kind and kind != "path" for _, kind in _PARAMETER.findall(route.path)):
        return answers
    # No route serves a path in which a parameter has the wrong type, such as a version that is not a number.
    meaning, bodies = answers.get("404", ("No route has this path", {}))
    unserved = contract.not_found(Call(body=b"", request_id="", path=route.path))
    return {**answers, "404": (meaning, {**bodies, **_body(unserved, contract.error)})}


def _refusals(refuse: Callable[[RequestError], Reply], meanings: Meanings, schema: Schema = OBJECT) -> Answers:
    """Return the answers for these errors, by status. `schema` describes the JSON objects of the answers."""
    answers: dict[str, tuple[str, Mapping[str, Schema]]] = {}
    for error, meaning in meanings:
        reply = refuse(error)
        others, bodies = answers.get(str(reply.status), ("", {}))
        answers[str(reply.status)] = (f"{others}; {meaning}".removeprefix("; "), {**bodies, **_body(reply, schema)})
    return dict(sorted(answers.items()))


def _body(reply: Reply, schema: Schema) -> Mapping[str, Schema]:
    """Return the schema of an error's body, by media type. Empty if the error has no body."""
    kind = reply.content_type.partition(";")[0]
    return {kind: schema if kind == JSON else STRING} if reply.body else {}


def _item(method: str, path: str, tag: str, about: Operation) -> dict[str, Any]:
    item: dict[str, Any] = {
        "summary": about.summary,
        "operationId": _identity(method, path),
        "tags": [tag],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _KINDS.get(kind, STRING)}
            for name, kind in _PARAMETER.findall(path)
        ],
        "responses": _responses(about.answers),
    }
    if about.request is not None:
        item["requestBody"] = {"required": True, "content": {about.request_type: {"schema": about.request}}}
    return item


def _responses(answers: Answers) -> dict[str, Any]:
    return {
        status: {"description": meaning, "content": {kind: {"schema": schema} for kind, schema in bodies.items()}}
        for status, (meaning, bodies) in answers.items()
    }


def _identity(method: str, path: str) -> str:
    path = _PARAMETER.sub(r"\1", path)
    return re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")


def _hoisted(content: Any, schemas: dict[str, Any]) -> Any:
    """Move each schema that has a title into `schemas`. Return the content with references in place of the schemas."""
    if isinstance(content, list | tuple):
        return [_hoisted(value, schemas) for value in content]
    if not isinstance(content, Mapping):
        return content
    hoisted = {key: _hoisted(value, schemas) for key, value in content.items()}
    if not isinstance(title := hoisted.get("title"), str):
        return hoisted
    schemas[title] = hoisted
    return {"$ref": _SCHEMAS + title}


def _forwarded(vllm: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for contract in CONTRACTS:
        for route in contract.routes:
            if not isinstance(route, GenerationRoute) or route.contract is not None:
                continue
            verbs = vllm.get("paths", {}).get(route.path.removeprefix(ALIASED), {})
            for method in route.methods:
                if (item := verbs.get(method.lower())) is not None:
                    responses = _responses(_errors(contract, route)) | item.get("responses", {})
                    own = {
                        "operationId": _identity(method, route.path),
                        "tags": [contract.name],
                        "responses": responses,
                    }
                    paths.setdefault(route.path, {})[method.lower()] = {**item, **own}
    return paths


def _joined(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the operation of a route that two contracts share. It accepts the bodies of both."""
    request = either([_body_schema(item["requestBody"]) for item in (ours, theirs)])
    answer = either([_body_schema(item["responses"]["200"]) for item in (ours, theirs)])
    responses = {**theirs["responses"], **ours["responses"]}
    for status in ours["responses"].keys() & theirs["responses"].keys():
        contents = [item["responses"][status].get("content", {}) for item in (theirs, ours)]
        responses[status] = {**responses[status], "content": {**contents[0], **contents[1]}}
    content = {**responses["200"]["content"], JSON: {"schema": answer}}
    return {
        **ours,
        "summary": f"{ours['summary']}; {theirs['summary']}",
        "tags": ours["tags"] + theirs["tags"],
        "requestBody": {"required": True, "content": {JSON: {"schema": request}}},
        "responses": responses
        | {"200": {"description": "The answer of the contract that the body belongs to", "content": content}},
    }


def _body_schema(part: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = part.get("content", {}).get(JSON, {}).get("schema", {})
    return schema


def _referred_to(content: Any, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas that the content refers to, directly or through other schemas."""
    found: dict[str, Any] = {}
    names = _REFERENCE.findall(msgspec.json.encode(content).decode())
    while names:
        name = names.pop()
        if name in schemas and name not in found:
            found[name] = schemas[name]
            names += _REFERENCE.findall(msgspec.json.encode(schemas[name]).decode())
    return found


def swagger_assets() -> dict[str, tuple[Path, str]]:
    """Return Swagger UI's files and their content types by name. Empty if vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    directory = Path(next(iter((found and found.submodule_search_locations) or ()), "/nowhere"), *_SWAGGER)
    assets = {name: (directory / name, kind) for name, kind in _ASSETS.items()}
    return assets if all(path.is_file() for path, _ in assets.values()) else {}


def swagger_page(title: str) -> str:
    """Return the HTML of Swagger UI for /openapi.json. It loads nothing from other servers."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><link rel="stylesheet" href="docs/swagger-ui.css"></head><body>
<noscript><p>This page needs scripts; <a href="openapi.json">openapi.json</a> does not.</p></noscript>
<div id="swagger-ui"></div><script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({{url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, docExpansion: "none",
filter: true, defaultModelsExpandDepth: -1}})</script>
</body></html>"""
