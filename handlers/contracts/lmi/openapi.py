"""LMI's routes in the API description: generation, management of models and of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from handlers.contracts.family import Operation
from handlers.contracts.lmi import dynamic_batch, rolling_batch
from handlers.contracts.lmi.asynchronous import PASSED_ON, RENAMED
from handlers.contracts.lmi.errors import JSON
from handlers.contracts.lmi.parameters import DEFAULT_MAX_NEW_TOKENS, read_parameters
from handlers.contracts.schemas import ANYTHING, OBJECT, STRING, Schema, an_answer, an_array, an_object, either
from handlers.contracts.schemas import parameters as asked_for
from handlers.contracts.vllm_parameters import read_vllm_parameters
from handlers.model_settings import HandlerSettings, ModelSettings

JSON_LINES, EVENTS = "application/jsonlines", "text/event-stream"
_FALSE: Schema = {"type": "boolean", "default": False}
_ONE_OR_MORE: Schema = {"type": ["string", "array"], "items": STRING}

_DETAILS = "finish_reason, generated_tokens, prefill, tokens and more, where asked for"
_ANSWER = an_answer("LmiAnswer", f"details: {_DETAILS}.", "generated_text", "details")
_RECORD = an_answer(
    "LmiRecord",
    "One for each token, which has id, text and log_prob (`logprob` in TGI's form and under option.async_mode). "
    f"The last one has the whole generated_text, and details: {_DETAILS}.",
    *("token", "generated_text", "details"),
)
_CHAT = an_answer("LmiChatAnswer", "LMI's answer to a chat.", "id", "object", "created", "choices", "usage")
_CHAT_RECORD = an_answer("LmiChatRecord", "One for each part of a chat's answer.", "id", "object", "created", "choices")
_OPENAI = an_answer("OpenAIAnswer", "OpenAI's object, as /v1/chat/completions or /v1/completions answers, or a chunk.")
_TEXT = an_answer("LmiText", "The prompt and what was generated after it.", "generated_text")
_STEP = an_answer("LmiStepRecord", "One for each step: what it added to each prompt's text.", "outputs")

_FRONT_END_ERROR = an_answer(
    "LmiFrontEndError", "The status, LMI's name for it, what is wrong.", *("code", "type", "message")
)
_HANDLER_ERROR = an_answer("LmiHandlerError", "error: what is wrong.", "code", "message", "error")
_REQUEST_ERROR = an_answer(
    "LmiError",
    "The status and what is wrong; an empty text with finish_reason `error` where a parameter or the generation is.",
    *("error", "code", "generated_text", "details"),
)


def invocation(model: ModelSettings, for_vllm: Mapping[str, Schema]) -> Operation:
    """`/invocations` under these settings.

    `for_vllm`: schemas of the bodies that vLLM's front end answers there, by vLLM's path for them.
    """
    if model.handler is not None:
        return _custom_handler(model.handler)
    if model.rolling_batch == "disable":
        return _dynamic_batch(model)
    if model.async_mode:
        name, request = "asynchronous handler", _asynchronous_request(model)
        answers = [(JSON, _ANSWER), (JSON_LINES, _RECORD)]
        chats = [(JSON, _OPENAI), (JSON_LINES, _OPENAI)]
    else:
        name, request = "rolling batch", _rolling_batch_request(model)
        whole = an_array(_ANSWER) if model.tgi_compat else _ANSWER
        answers = [(JSON, whole), (JSON_LINES, _RECORD), (EVENTS, _RECORD)]
        chats = [(JSON, _OPENAI), (EVENTS, _OPENAI)]
        if model.chat_format == "lmi":
            chats += [(JSON, _CHAT), (JSON_LINES, _CHAT_RECORD)]
    if for_vllm:
        answers += chats
    content = {kind: either([schema for given, schema in answers if given == kind]) for kind, _ in answers}
    kinds = [f"LMI {name}", *(f"OpenAI's {path.removeprefix('/v1/')}" for path in for_vllm)]
    return Operation(
        summary=f"Generate text ({', '.join(kinds)})",
        request=either([request, *for_vllm.values()]),
        answers={"200": ("One document, or a record for each token", content), **_failures(_REQUEST_ERROR)},
    )


def _rolling_batch_request(model: ModelSettings) -> Schema:
    rules = rolling_batch.parameter_rules(model)
    parameters = asked_for(lambda reader: read_parameters({}, rules, reader))
    return _request("LmiRequest", parameters, stream=_FALSE, **_adapters(model))


def _asynchronous_request(model: ModelSettings) -> Schema:
    asked = asked_for(lambda reader: read_vllm_parameters({}, reader=reader))
    passed = {name: schema for name, schema in asked.items() if name in PASSED_ON}
    passed |= {"max_tokens": {**asked["max_tokens"], "default": DEFAULT_MAX_NEW_TOKENS}, "structured_outputs": OBJECT}
    passed |= {name: passed[theirs] for name, theirs in RENAMED.items()}
    own = dict.fromkeys(("details", "decoder_input_details", "return_full_text"), _FALSE)
    more = {"do_sample": {"type": "boolean"}, "stop_sequences": an_array(STRING)}
    return _request("LmiAsyncRequest", {**passed, **own, **more}, stream=_FALSE, **_adapters(model))


def _adapters(model: ModelSettings) -> dict[str, Schema]:
    return {"adapters": _ONE_OR_MORE} if model.enable_lora else {}


def _request(name: str, parameters: Mapping[str, Schema], **more: Schema) -> Schema:
    fields = {"inputs": _ONE_OR_MORE, "parameters": an_object(parameters), **more}
    return an_object(fields, "inputs", name=name, description="A body of type text/plain is the prompt alone.")


def _dynamic_batch(model: ModelSettings) -> Operation:
    rules = dynamic_batch.parameter_rules(model)
    parameters = asked_for(lambda reader: read_parameters({}, rules, reader))
    limit = {**parameters["max_new_tokens"], "default": dynamic_batch.default_max_new_tokens(model)}
    content = {JSON: an_array(_TEXT), JSON_LINES: _STEP}
    return Operation(
        summary="Generate text (LMI dynamic batch)",
        request=_request("LmiRequest", {**parameters, "max_new_tokens": limit}),
        answers={
            "200": ("A text for each prompt; with option.enable_streaming a record for each step", content),
            **_failures(_HANDLER_ERROR),
        },
    )


def _custom_handler(handler: HandlerSettings) -> Operation:
    return Operation(
        summary=f"Call the model's own handler ({Path(handler.entry_point).name})",
        request=ANYTHING,
        request_type="*/*",
        answers={
            "200": ("Whatever the handler answers; its status may be another", {"*/*": ANYTHING}),
            "204": ("The handler returned nothing", {}),
            **_failures(_HANDLER_ERROR),
            "507": ("The handler ran out of memory", {}),
        },
    )


def _failures(error: Schema) -> dict[str, tuple[str, Mapping[str, Schema]]]:
    return {
        "404": ("Unknown model", {JSON: _FRONT_END_ERROR}),
        "413": ("The body is too large", {}),
        "424": ("The payload or a parameter is wrong, or generation failed (option.async_mode: 500)", {JSON: error}),
        "503": ("The queue is full, or the model is not ready", {JSON: _FRONT_END_ERROR}),
    }


def _manages(summary: str, *, creates: bool = False) -> Operation:
    """Parameters come in the query or, where something is registered, as a JSON object."""
    answers = {"200": ("Done", {JSON: OBJECT}), "400": ("A parameter is missing or wrong", {JSON: _FRONT_END_ERROR})}
    return Operation(summary=summary, request=OBJECT if creates else None, answers=answers)


MANAGEMENT: Mapping[tuple[str, str], Operation] = {
    ("GET", "/models"): _manages("List models"),
    ("POST", "/models"): _manages("Load a model", creates=True),
    ("GET", "/models/{model}"): _manages("Describe a model, each version of it"),
    ("PUT", "/models/{model}"): _manages("Scale a model"),
    ("DELETE", "/models/{model}"): _manages("Unload a model"),
}
"""By method and path; `/workflows` has the same operations."""
ADAPTERS: Mapping[tuple[str, str], Operation] = {
    (method, prefix + path): _manages(summary, creates=method == "POST")
    for prefix in ("", "/models/{model}")
    for method, path, summary in (
        ("GET", "/adapters", "List adapters"),
        ("POST", "/adapters", "Register an adapter"),
        ("GET", "/adapters/{adapter}", "Describe an adapter"),
        ("DELETE", "/adapters/{adapter}", "Unregister an adapter"),
        ("POST", "/adapters/{adapter}/update", "Load or pin an adapter"),
    )
}
