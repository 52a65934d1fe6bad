"""happy_vllm's technical routes. Source: contracts/happy_vllm.md sections 8 and 9."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from handlers.contracts.family import ModelView
from handlers.contracts.happy_vllm.body import document, required_string
from handlers.contracts.happy_vllm.errors import JSON
from handlers.contracts.protocol import Call, Reply

APPLICATION = "happy_vllm"


def liveness(call: Call, view: ModelView) -> Reply:
    """`GET /liveness`: whether the process answers."""
    return _reply({"alive": "ok"})


def readiness(call: Call, view: ModelView) -> Reply:
    """`GET /readiness`: always 200; the body says whether the model answers."""
    return all_readiness(call, (view,))


def all_liveness(call: Call, views: Sequence[ModelView]) -> Reply:
    """The same of a server with several models."""
    return _reply({"alive": "ok"})


def all_readiness(call: Call, views: Sequence[ModelView]) -> Reply:
    """The same of a server with several models: whether all answer."""
    return _reply({"ready": "ok" if all(view.state == "ready" for view in views) else "ko"})


def info(call: Call, view: ModelView) -> Reply:
    """`GET /v1/info`."""
    model = view.text()
    return _reply(
        {
            "application": APPLICATION,
            "version": version("slipway"),
            "vllm_version": view.engine_version if view.engine == "vllm" else f"{view.engine} {view.engine_version}",
            "model_name": view.settings.name,
            "truncation_side": model.texts.truncation_side,
            "max_length": model.max_model_len,
            "extra_information": {},
        }
    )


def launch_arguments(call: Call, view: ModelView) -> Reply:
    """`GET /v1/launch_arguments`: empty, as it is in happy_vllm unless it is told to show them."""
    return _reply({})


def live_metrics(call: Call, view: ModelView) -> Reply:
    """`GET /live_metrics`. vLLM no longer swaps sequences to the CPU, so what counts that is zero."""
    status = view.text().status()
    return _reply(
        {
            "requests_running": status.running_requests,
            "requests_swapped": 0,
            "requests_pending": status.waiting_requests,
            "gpu_cache_usage": status.kv_cache_usage,
            "cpu_cache_usage": 0.0,
        }
    )


def abort_request(call: Call, view: ModelView) -> Reply:
    """`POST /v1/abort_request`: null, whether or not there is such a request."""
    view.abort(required_string(document(call), "request_id"))
    return _reply(None)


def _reply(answer: dict[str, Any] | None) -> Reply:
    return Reply(200, JSON, msgspec.json.encode(answer))
