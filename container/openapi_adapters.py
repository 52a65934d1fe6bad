"""The routes for managing adapters, as the API description shows them. Source: contracts/lmi.md section 9.1."""

from __future__ import annotations

from typing import Any

from handlers.contracts.openai.adapters import LOAD, UNLOAD

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
            "get": _operation("List adapters", f"adapters{own}", model, query=_query("limit", "next_page_token")),
            "post": _operation("Register an adapter", f"register_adapter{own}", model, fields=_FIELDS),
        }
        paths[f"{prefix}/adapters/{{adapter}}"] = {
            "get": _operation("Describe an adapter", f"adapter{own}", adapter),
            "delete": _operation("Unregister an adapter", f"unregister_adapter{own}", adapter),
        }
        changed = {name: _FIELDS[name] for name in ("preload", "pin")}
        paths[f"{prefix}/adapters/{{adapter}}/update"] = {
            "post": _operation("Load or pin an adapter", f"update_adapter{own}", adapter, fields=changed),
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


def _operation(
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
