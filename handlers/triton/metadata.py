"""Triton's routes that generate nothing.

KServe defines health and metadata. Triton defines the model configuration, statistics and the model repository.
Source: KServe, "Open Inference Protocol (V2 Inference Protocol)"; Triton 2.68, the extensions "Model Configuration",
"Statistics" and "Model Repository". Each model has one version. The metadata match Triton's vLLM backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from engines.errors import SHOWN
from engines.statistics import EngineStatistics
from handlers.contract import JSON, Call, Reply
from handlers.parsing.json_fields import JsonError, decode_json
from handlers.route_declarations import OWN_HANDLER, ModelView
from handlers.triton.errors import VERSION, error_reply, missing_model
from handlers.triton.request import TENSORRT_LLM_INPUTS, VLLM_INPUTS, Kind

PROTOCOL_VERSION = "2.68.0"  # The release of Triton whose protocol this module implements.
_EXTENSIONS = ("model_repository", "model_configuration", "parameters", "statistics")
_SERVER = {"name": "triton", "version": PROTOCOL_VERSION, "extensions": _EXTENSIONS}
_YES, _NO = Reply(200, "", b""), Reply(400, "", b"")
_DATA_TYPES: dict[Kind, str] = {"text": "BYTES", "texts": "BYTES", "boolean": "BOOL", "integer": "INT32"}
_REPOSITORY_STATES = {"ready": "READY", "starting": "LOADING", "draining": "UNLOADING"}
_VLLM_OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
_TENSORRT_LLM_OUTPUTS = {"cum_log_probs": "FP32", "output_log_probs": "FP32"}

Tell = Callable[[Call, ModelView], Reply]


def of_served_model(tell: Tell) -> Tell:
    """Wrap `tell`. If the path names another model, the returned function answers with Triton's error."""

    def checked(call: Call, view: ModelView) -> Reply:
        return missing_model(call.path_parameters, view.config) or tell(call, view)

    return checked


def live(call: Call, views: Sequence[ModelView]) -> Reply:
    """Return 200 unless an engine has failed or stopped. Models that load or drain count as live."""
    return _NO if any(view.state in ("failed", "stopped") for view in views) else _YES


def ready(call: Call, views: Sequence[ModelView]) -> Reply:
    """Return 200 if all models are ready."""
    return _YES if all(view.state == "ready" for view in views) else _NO


def server_metadata(call: Call, views: Sequence[ModelView]) -> Reply:
    """Return Triton's name and extensions. Some clients check them."""
    return _json(_SERVER)


def model_ready(call: Call, view: ModelView) -> Reply:
    """Return 200 if the model is ready. A model that is not served counts as not ready, as in Triton."""
    if view.state != "ready" or missing_model(call.path_parameters, view.config):
        return error_reply(400, "Model version not ready")
    return _YES


@of_served_model
def metadata(call: Call, view: ModelView) -> Reply:
    """Return the model's inputs and outputs. Both lists are empty if the model has a custom handler."""
    inputs, outputs = _tensors(view)
    return _json(
        {
            "name": view.config.name,
            "versions": [VERSION],
            "platform": "python",
            "inputs": [
                {"name": name, "datatype": _DATA_TYPES[kind], "shape": _shape(kind)} for name, kind in inputs.items()
            ],
            "outputs": [
                {"name": name, "datatype": kind, "shape": _output_shape(name)} for name, kind in outputs.items()
            ],
        }
    )


@of_served_model
def configuration(call: Call, view: ModelView) -> Reply:
    """Return Triton's model configuration. Values without a counterpart in Slipway are empty."""
    inputs, outputs = _tensors(view)
    return _json(
        {
            "name": view.config.name,
            "platform": "",
            "backend": _backend(view),
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": 0,
            "input": [
                {
                    "name": name,
                    "data_type": _config_type(_DATA_TYPES[kind]),
                    "format": "FORMAT_NONE",
                    "dims": _shape(kind),
                    "is_shape_tensor": False,
                    "allow_ragged_batch": False,
                    "optional": name != "text_input",
                }
                for name, kind in inputs.items()
            ],
            "output": [
                {
                    "name": name,
                    "data_type": _config_type(kind),
                    "dims": _output_shape(name),
                    "label_filename": "",
                    "is_shape_tensor": False,
                }
                for name, kind in outputs.items()
            ],
            "batch_input": [],
            "batch_output": [],
            "instance_group": [],
            "default_model_filename": "model.py",
            "cc_model_filenames": {},
            "metric_tags": {},
            "parameters": {},
            "model_warmup": [],
            "model_transaction_policy": {"decoupled": True},
        }
    )


def model_statistics(call: Call, view: ModelView) -> Reply:
    """Return the model's counts and times. As in Triton, the status is 400 for a model that is not served."""
    missing = missing_model(call.path_parameters, view.config)
    return statistics(call, (view,)) if missing is None else Reply(400, JSON, missing.body)


def statistics(call: Call, views: Sequence[ModelView]) -> Reply:
    """Return counts and times of all models since the start. They include the calls of all contracts.

    Times are in nanoseconds, except that `last_inference` is in milliseconds.
    """
    return _json({"model_stats": [_statistics(view) for view in views]})


def _statistics(view: ModelView) -> dict[str, Any]:
    statistics = view.loaded.statistics if view.loaded is not None else EngineStatistics()
    calls = statistics.calls
    # The engine adds up the queue times of all sequences, and a call may have several sequences. So the sum is limited
    # to the time of the calls.
    waited = min(statistics.queue_time.total, calls.succeeded_seconds)
    return {
        "name": view.config.name,
        "version": VERSION,
        "last_inference": int(calls.last_at * 1000),
        "inference_count": calls.succeeded,
        "execution_count": calls.succeeded,
        "inference_stats": {
            "success": _duration(calls.succeeded, calls.succeeded_seconds),
            "fail": _duration(calls.failed, calls.failed_seconds),
            "queue": _duration(calls.succeeded, waited),
            "compute_input": _duration(calls.succeeded, 0.0),
            "compute_infer": _duration(calls.succeeded, calls.succeeded_seconds - waited),
            "compute_output": _duration(calls.succeeded, 0.0),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def repository_index(call: Call, views: Sequence[ModelView]) -> Reply:
    """Return the models and their states. With `{"ready": true}` return only models that are ready."""
    document = _object_of(call.body)
    if isinstance(document, Reply):
        return document
    only_ready = document.get("ready", False)
    if not isinstance(only_ready, bool):
        return error_reply(400, "Unable to parse 'ready': attempt to access JSON non-boolean as boolean")
    return _json([_indexed(view) for view in views if view.state == "ready" or not only_ready])


def of_one_repository(call: Call, views: Sequence[ModelView]) -> Reply:
    """Refuse a path that names a repository, as Triton does."""
    return error_reply(501, "'repository_name' specification is not supported")


def _object_of(body: bytes) -> dict[str, Any] | Reply:
    """Return the JSON object of a body, or the reply that refuses it. For an empty body, return an empty object."""
    if not body.strip():
        return {}
    try:
        document = decode_json(body)
    except JsonError as error:
        return error_reply(400, f"failed to parse the request JSON buffer: {error}")
    if not isinstance(document, dict):
        return error_reply(400, "attempt to get members for non-object: the body must be a JSON object")
    return document


def _indexed(view: ModelView) -> dict[str, str]:
    state = _REPOSITORY_STATES.get(view.state, "UNAVAILABLE")
    model = {"name": view.config.name, "version": VERSION, "state": state}
    return model | {"reason": view.reason} if view.reason else model


def load(call: Call, view: ModelView) -> Reply:
    """Return 200 for the served model if it is ready. Other models, and other configurations, cannot be loaded."""
    name = call.path_parameters["model"]
    if name != view.config.name:
        return error_reply(404, f"failed to load '{name[:SHOWN]}': this server serves '{view.config.name}' only")
    document = _object_of(call.body)
    if isinstance(document, Reply):
        return document
    if document.get("parameters"):
        return error_reply(501, f"failed to load '{name}': `parameters` must be empty; settings cannot be replaced")
    if view.state == "ready":
        return _YES
    return error_reply(503, f"failed to load '{name}': it is {view.state}" + (view.reason and f" ({view.reason})"))


def unload(call: Call, view: ModelView) -> Reply:
    """Refuse to unload the served model. Other models count as already unloaded, as in Triton."""
    if call.path_parameters["model"] != view.config.name:
        return _YES
    return error_reply(501, f"unload is not supported: this server serves '{view.config.name}' as long as it runs")


@of_served_model
def infer(call: Call, view: ModelView) -> Reply:
    """Refuse KServe's inference with tensors, as Triton does for a streaming (decoupled) model."""
    if view.config.handler is not None:
        return error_reply(501, f"/infer is not served: {OWN_HANDLER}")
    path = call.path.removesuffix("/infer")
    return error_reply(501, f"/infer is not served; use POST {path}/generate or POST {path}/generate_stream")


def _backend(view: ModelView) -> str:
    if view.engine != "vllm":
        return "python"
    return "tensorrtllm" if view.config.rolling_batch == "trtllm" else "vllm"


def _tensors(view: ModelView) -> tuple[Mapping[str, Kind], Mapping[str, str]]:
    if view.config.handler is not None:
        return {}, {}
    if view.config.rolling_batch == "trtllm":
        return VLLM_INPUTS | TENSORRT_LLM_INPUTS, _VLLM_OUTPUTS | _TENSORRT_LLM_OUTPUTS
    return VLLM_INPUTS, _VLLM_OUTPUTS


def _output_shape(name: str) -> list[int]:
    return [1] if name == "num_input_tokens" else [-1]


def _shape(kind: Kind) -> list[int]:
    return [-1] if kind == "texts" else [1]


def _config_type(data_type: str) -> str:
    return "TYPE_STRING" if data_type == "BYTES" else f"TYPE_{data_type}"


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}


def _json(document: Any) -> Reply:
    return Reply(200, JSON, msgspec.json.encode(document))
