"""OpenAPI paths of the management routes, as `container.management` serves them."""

from __future__ import annotations

from typing import Any

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
            "get": _operation("Models of this server", "models", _PAGE, {"200": "The list"}),
            "post": _operation(
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
    item = _operation(summary, operation, query, {**answers, "404": "There is no such model"})
    item["parameters"].insert(0, _BY_NAME)
    return item


def _operation(
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
