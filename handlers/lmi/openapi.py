"""The API description of the LMI routes: generation, and the management of models and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from handlers.contract import JSON
from handlers.custom.settings import HandlerConfig
from handlers.lmi import dynamic_batch, rolling_batch
from handlers.lmi.asynchronous import VLLM_NAMES, VLLM_PARAMETERS
from handlers.lmi.parameters import DEFAULT_MAX_NEW_TOKENS, read_parameters
from handlers.model_config import ModelConfig
from handlers.openapi_schemas import ANYTHING, OBJECT, STRING, Schema, an_answer, an_array, an_object, either
from handlers.openapi_schemas import parameters as parameter_schemas
from handlers.parsing.vllm_parameters import read_vllm_parameters
from handlers.route_declarations import Operation

JSON_LINES, EVENTS = "application/jsonlines", "text/event-stream"
_FALSE: Schema = {"type": "boolean", "default": False}
_ONE_OR_MORE: Schema = {"type": ["string", "array"], "items": STRING}

_FRONT_END_ERROR = an_answer(
    "LmiFrontEndError", "The status, LMI's name for the error, and a message.", *("code", "type", "message")
)


def invocation(config: ModelConfig, for_vllm: Mapping[str, Schema]) -> Operation:
    """Return the description of `/invocations` under these settings.

    Args:
        config: The model's settings.
        for_vllm: The schemas of the other bodies that `/invocations` accepts. vLLM's front end answers these bodies.
            The keys are vLLM's paths for them.
    """
    if config.handler is not None:
        return _custom_handler(config.handler)
    if config.rolling_batch == "disable":
        return _dynamic_batch(config)
    if config.lmi.async_mode:
        name, request = "asynchronous handler", _asynchronous_request(config)
    else:
        rules = rolling_batch.parameter_rules(config)
        parameters = parameter_schemas(lambda reader: read_parameters({}, rules, reader))
        name, request = "rolling batch", _request("LmiRequest", parameters, stream=_FALSE, **_adapters(config))
    names = [f"LMI {name}", *(f"OpenAI's {path.removeprefix('/v1/')}" for path in for_vllm)]
    return Operation(
        summary=f"Generate text ({', '.join(names)})",
        request=either([request, *for_vllm.values()]),
        answers=_answers("One document, or a record for each token", JSON, JSON_LINES, EVENTS),
    )


def _asynchronous_request(config: ModelConfig) -> Schema:
    schemas = parameter_schemas(lambda reader: read_vllm_parameters({}, reader=reader))
    passed = {name: schema for name, schema in schemas.items() if name in VLLM_PARAMETERS}
    passed |= {"max_tokens": {**schemas["max_tokens"], "default": DEFAULT_MAX_NEW_TOKENS}, "structured_outputs": OBJECT}
    passed |= {name: passed[vllm_name] for name, vllm_name in VLLM_NAMES.items()}
    own = dict.fromkeys(("details", "decoder_input_details", "return_full_text"), _FALSE)
    more = {"do_sample": {"type": "boolean"}, "stop_sequences": an_array(STRING)}
    return _request("LmiAsyncRequest", {**passed, **own, **more}, stream=_FALSE, **_adapters(config))


def _adapters(config: ModelConfig) -> dict[str, Schema]:
    return {"adapters": _ONE_OR_MORE} if config.enable_lora else {}


def _request(name: str, parameters: Mapping[str, Schema], **more: Schema) -> Schema:
    fields = {"inputs": _ONE_OR_MORE, "parameters": an_object(parameters), **more}
    return an_object(fields, "inputs", name=name, description="A body of type text/plain is only the prompt.")


def _dynamic_batch(config: ModelConfig) -> Operation:
    rules = dynamic_batch.parameter_rules(config)
    parameters = parameter_schemas(lambda reader: read_parameters({}, rules, reader))
    limit = {**parameters["max_new_tokens"], "default": dynamic_batch.default_max_new_tokens(config)}
    return Operation(
        summary="Generate text (LMI dynamic batch)",
        request=_request("LmiRequest", {**parameters, "max_new_tokens": limit}),
        answers=_answers(
            "A text for each prompt; with option.enable_streaming a record for each step", JSON, JSON_LINES
        ),
    )


def _custom_handler(handler_config: HandlerConfig) -> Operation:
    return Operation(
        summary=f"Call the model's own handler ({Path(handler_config.entry_point).name})",
        request=ANYTHING,
        request_type="*/*",
        answers={
            **_answers("The handler's answer. The handler may also set another status", "*/*"),
            "204": ("The handler returned nothing", {}),
            "507": ("The handler ran out of memory", {}),
        },
    )


def _answers(meaning: str, *kinds: str) -> dict[str, tuple[str, Mapping[str, Schema]]]:
    """Return the answers of `/invocations`.

    Args:
        meaning: The meaning of a successful answer.
        kinds: The media types of a successful answer.
    """
    return {
        "200": (meaning, dict.fromkeys(kinds, ANYTHING)),
        "400": ("vLLM refuses a body with `prompt`. The body is vLLM's error", {JSON: OBJECT}),
        "404": ("Unknown model", {JSON: _FRONT_END_ERROR}),
        "408": ("The rest of the body does not arrive in time", {JSON: _FRONT_END_ERROR}),
        "413": ("The body is too large", {}),
        "424": ("The payload or a parameter is wrong, or generation failed (option.async_mode: 500)", {JSON: OBJECT}),
        "500": ("The engine has died", {JSON: OBJECT}),
        "503": ("The queue is full, or the model is not ready", {JSON: _FRONT_END_ERROR}),
    }


def _operation(summary: str, *, creates: bool = False) -> Operation:
    """Return the description of a management call.

    The parameters are in the query. A registration may have them in a JSON object instead.
    """
    return Operation(summary=summary, request=OBJECT if creates else None, answers={"200": ("Done", {JSON: OBJECT})})


def _model_operation(summary: str, failures: str, *, creates: bool = False) -> Operation:
    """Return the description of a call that manages models.

    Args:
        summary: The summary.
        failures: The statuses of the call's errors, separated by spaces.
        creates: True if the call registers a model.
    """
    about = _operation(summary, creates=creates)
    errors = {status: (_FAILURES[status], {JSON: _FRONT_END_ERROR}) for status in failures.split()}
    return replace(about, answers={**about.answers, **errors})


_FAILURES = {
    "400": "A parameter is missing or wrong",
    "404": "There is no such model",
    "408": "The rest of the body does not arrive in time",
    "409": "A model with this name and version is already registered",
    "413": "The body is too large",
    "500": "The model cannot be loaded",
    "503": "The server is stopping",
    "507": "There is not enough memory for the model",
}
# The operations, by method and path. `/workflows` has the same operations as `/models`.
MANAGEMENT: Mapping[tuple[str, str], Operation] = {
    ("GET", "/models"): _model_operation("List models", "400"),
    ("POST", "/models"): _model_operation("Load a model", "400 404 408 409 413 500 503 507", creates=True),
    ("GET", "/models/{model}"): _model_operation("Describe all versions of a model", "404"),
    ("PUT", "/models/{model}"): _model_operation("Scale a model", "400 404"),
    ("DELETE", "/models/{model}"): _model_operation("Unload a model", "400 404"),
}
ADAPTERS: Mapping[tuple[str, str], Operation] = {
    (method, prefix + path): _operation(summary, creates=method == "POST")
    for prefix in ("", "/models/{model}")
    for method, path, summary in (
        ("GET", "/adapters", "List adapters"),
        ("POST", "/adapters", "Register an adapter"),
        ("GET", "/adapters/{adapter}", "Describe an adapter"),
        ("DELETE", "/adapters/{adapter}", "Unregister an adapter"),
        ("POST", "/adapters/{adapter}/update", "Load or pin an adapter"),
    )
}
