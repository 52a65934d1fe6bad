"""`/openapi.json`: what is served, as OpenAPI."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from container.openapi_families import family_paths, forwarded
from container.openapi_schemas import SCHEMAS
from handlers.families import FAMILIES
from handlers.model_settings import HandlerSettings, ModelSettings

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
    paths = {**_paths(model), **family_paths(FAMILIES, generates=model.handler is None)}
    schemas = _named_in(paths)
    if vllm is not None:
        routes, theirs = forwarded(FAMILIES, vllm)
        for path, verbs in routes.items():
            paths[path] = {**verbs, **paths.get(path, {})}
        schemas |= theirs
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
            if name not in found:
                found[name] = SCHEMAS[name]
                todo.append(SCHEMAS[name])
    return {name: schema for name, schema in SCHEMAS.items() if name in found}


def _paths(model: ModelSettings) -> dict[str, Any]:
    inference = _inference(model)
    return {
        "/invocations": {"post": {**inference, "operationId": "invocations"}},
        f"/predictions/{model.name}": {"post": {**inference, "operationId": "predictions"}},
        "/ping": {"get": _get("Health: 200 when the model generates", "ping", "application/json", ("500", "503"))},
        "/metrics": {"get": _get("Prometheus metrics", "metrics", "text/plain")},
        "/openapi.json": {"get": _get("This document", "openapi", "application/json")},
        "/docs": {"get": _get("This document as a page to try things on", "docs", "text/html")},
        "/docs/plain": {"get": _get("The same as a page without scripts", "docs_plain", "text/html")},
    }


def _inference(model: ModelSettings) -> dict[str, Any]:
    if model.handler is not None:
        return _custom(model.handler)
    return _dynamic_batch() if model.rolling_batch == "disable" else _rolling_batch(model)


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


def _get(summary: str, operation: str, media_type: str, failures: tuple[str, ...] = ()) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": summary, "content": {media_type: {}}}}
    responses |= {status: {"description": "Not ready."} for status in failures}
    return {"summary": summary, "operationId": operation, "responses": responses}


def _error(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(schema)}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
