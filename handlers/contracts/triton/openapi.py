"""Triton's and KServe's routes in the API description."""

from __future__ import annotations

from collections.abc import Mapping

from handlers.contracts.family import Operation
from handlers.contracts.schemas import OBJECT, STRING, Schema, an_answer, an_array, an_object, parameters
from handlers.contracts.triton.request import TENSORRT_LLM_INPUTS, VLLM_INPUTS
from handlers.contracts.vllm_parameters import read_vllm_parameters

JSON, EVENTS = "application/json", "text/event-stream"
_SCALARS = ("string", "integer", "number", "boolean")
_KINDS: dict[str, Schema] = {
    "text": STRING,
    "texts": {"type": ["string", "array"], "items": STRING},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
}
_SAMPLING = {
    name: schema if schema["type"] in _SCALARS else {**STRING, "contentMediaType": JSON}
    for name, schema in parameters(lambda reader: read_vllm_parameters({}, reader=reader)).items()
} | {"stop": STRING, "structured_outputs": {**STRING, "contentMediaType": JSON}}

_REQUEST = an_object(
    {
        "id": STRING,
        **{name: _KINDS[kind] for name, kind in (VLLM_INPUTS | TENSORRT_LLM_INPUTS).items()},
        "parameters": an_object(
            _SAMPLING,
            additionalProperties={"type": _SCALARS},
            description="Sampling parameters by vLLM's names; they may stand beside text_input as well.",
        ),
    },
    "text_input",
    name="TritonRequest",
)
_RESPONSE = an_answer(
    "TritonResponse",
    "The text; in a stream what is new. Arrays where n is above 1. What else there is depends on the return_ inputs.",
    *("id", "model_name", "model_version", "text_output", "finish_reason", "cumulative_logprob", "logprobs"),
    *("num_input_tokens", "num_output_tokens", "cum_log_probs", "output_log_probs"),
)
_ERROR = {JSON: an_answer("TritonError", "What is wrong.", "error")}
_UNKNOWN: dict[str, tuple[str, Mapping[str, Schema]]] = {"404": ("Unknown model or version", _ERROR)}


def _generates(summary: str, meaning: str, kind: str) -> Operation:
    return Operation(
        summary=summary,
        request=_REQUEST,
        answers={
            "200": (meaning, {kind: _RESPONSE}),
            "400": ("The request is wrong", _ERROR),
            **_UNKNOWN,
            "500": ("Generation failed", _ERROR),
            "503": ("The queue is full, or the model is not ready", _ERROR),
        },
    )


GENERATE = _generates("Generate text (Triton)", "One response", JSON)
GENERATE_STREAM = _generates(
    "Generate text as server-sent events (Triton)", "An event for each response, or with an error", EVENTS
)


def probe(summary: str) -> Operation:
    """A route that answers by its status."""
    return Operation(summary=summary, answers={"200": ("Yes", {}), "400": ("No", {JSON: {}})})


def document(summary: str) -> Operation:
    """A route that answers with an object."""
    return Operation(summary=summary, answers={"200": (summary, {JSON: OBJECT}), **_UNKNOWN})


INDEX = Operation(
    summary="Models of this server (Triton)",
    request=an_object({"ready": {"type": "boolean", "default": False, "description": "Only ready ones."}}),
    answers={"200": ("The models", {JSON: an_array(OBJECT)})},
)
LOAD = Operation(
    summary="Load a model; the served one is loaded (Triton)",
    answers={
        "200": ("It is loaded", {}),
        "404": ("There is no such model", _ERROR),
        "503": ("It is not ready", _ERROR),
    },
)
UNLOAD = Operation(
    summary="Unload a model; refused for the served one (Triton)",
    answers={"200": ("There is no such model", {}), "501": ("It is the served one", _ERROR)},
)
INFER = Operation(
    summary="Tensors in and out (KServe); refused, use generate",
    answers={**_UNKNOWN, "501": ("Models of this kind do not take it", _ERROR)},
)
