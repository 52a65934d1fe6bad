"""TGI's routes /health and /info. Source: TGI's router, `src/server.rs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from handlers.contract import JSON, Call, Reply
from handlers.route_declarations import ModelView
from handlers.tgi.errors import error_document
from handlers.tgi.request import max_input_tokens

TGI_VERSION = "3.3.6"  # The release whose contract this package implements. Clients derive limits from the version.
# TGI's defaults, which clients read from /info. Slipway has no separate limit on the size of a batch.
_MAX_CLIENT_BATCH_SIZE, _VALIDATION_WORKERS = 4, 2
_UNHEALTHY = Reply(503, JSON, error_document("unhealthy", "healthcheck").encode())


def health(_: Call, views: Sequence[ModelView]) -> Reply:
    """Return 200 without a body if all models are ready, otherwise 503."""
    return Reply(200, "", b"") if all(view.state == "ready" for view in views) else _UNHEALTHY


def info(_: Call, view: ModelView) -> Reply:
    """Return the model's name and its limits."""
    model = view.text()
    info: dict[str, Any] = {
        "model_id": view.config.model_id,
        "model_sha": view.config.revision,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": view.max_requests,
        "max_best_of": view.config.tgi.max_best_of,
        "max_stop_sequences": view.config.tgi.max_stop_sequences,
        "max_input_tokens": max_input_tokens(model, view.config),
        "max_total_tokens": model.max_model_len,
        "validation_workers": _VALIDATION_WORKERS,
        "max_client_batch_size": _MAX_CLIENT_BATCH_SIZE,
        "router": "slipway",
        "version": TGI_VERSION,
        "sha": None,
        "docker_label": None,
    }
    return Reply(200, JSON, msgspec.json.encode(info))
