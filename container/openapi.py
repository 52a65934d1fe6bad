"""`/openapi.json`: what is served, as OpenAPI."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from container.openapi_adapters import adapter_paths
from container.openapi_families import family_paths, forwarded
from container.openapi_management import management_paths
from container.openapi_merging import joined
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
