"""`/openapi.json` and `/docs`: what is served, as OpenAPI and as a page that needs nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from container.openapi_schemas import SCHEMAS
from handlers.model_settings import HandlerSettings, ModelSettings

_REFERENCE = re.compile(r'"#/components/schemas/(\w+)"')


@dataclass(frozen=True, slots=True)
class Document:
    """An OpenAPI document, as data and as bytes."""

    content: dict[str, Any]
    json: bytes


def openapi_document(model: ModelSettings) -> Document:
    """OpenAPI 3.1 for what this server serves with these settings."""
    paths = _paths(model)
    content = {
        "openapi": "3.1.0",
        "info": {"title": f"Slipway: {model.name}", "version": "0.1.0"},
        "paths": paths,
        "components": {"schemas": _named_in(paths)},
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
        "/docs": {"get": _get("This page", "docs", "text/html")},
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


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ info.title }}</title><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}td,th{border-bottom:1px solid #ddd;padding:.3rem .6rem;
text-align:left;vertical-align:top}code{background:#f3f3f3;padding:.1rem .3rem;border-radius:3px}
h2 code{background:none;padding:0}.verb{text-transform:uppercase;color:#06c}</style></head><body>
<h1>{{ info.title }}</h1><p>The machine-readable form is <a href="openapi.json">openapi.json</a>.</p>
{% for path, verbs in paths.items() %}{% for verb, operation in verbs.items() %}
<h2><span class="verb">{{ verb }}</span> <code>{{ path }}</code></h2><p>{{ operation.summary }}</p>
<table><tr><th>Status</th><th>Meaning</th><th>Content</th></tr>
{% for status, response in operation.responses.items() %}<tr><td>{{ status }}</td><td>{{ response.description }}</td>
<td>{% for type, body in (response.content or {}).items() %}<code>{{ type }}</code>
{% if body.schema and body.schema["$ref"] %}<a href="#{{ body.schema["$ref"].split("/")[-1] }}">
{{ body.schema["$ref"].split("/")[-1] }}</a>{% endif %}<br>{% endfor %}</td></tr>{% endfor %}</table>
{% endfor %}{% endfor %}
{% for name, schema in components.schemas.items() %}<h2 id="{{ name }}">{{ name }}</h2>
{% if schema.description %}<p>{{ schema.description }}</p>{% endif %}
<table><tr><th>Field</th><th>Type</th><th>Default</th><th>Meaning</th></tr>
{% for field, type in schema.properties.items() %}<tr><td><code>{{ field }}</code></td>
<td>{{ type.type or (type["$ref"] or "").split("/")[-1] }}</td>
<td>{% if "default" in type %}<code>{{ type.default | tojson }}</code>{% endif %}</td>
<td>{{ type.description }}</td></tr>
{% endfor %}</table>{% endfor %}
</body></html>"""


def openapi_page(document: Document) -> str:
    """The document as a page for people."""
    environment = jinja2.Environment(autoescape=True)
    return environment.from_string(_PAGE).render(document.content)
