"""Decorators for functions in a customer's `model.py`, and request parsers for handlers.

A decorator marks a function, and `djl_python.service_loader` finds the function by this mark.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from djl_python import wire
from djl_python.encode_decode import decode
from djl_python.inputs import Input
from djl_python.request import Request
from djl_python.request_io import TextInput

# The request header that names a LoRA adapter.
SAGEMAKER_ADAPTER_IDENTIFIER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"

# The parameters of a chat and their defaults. Other parameters are ignored.
_CHAT_PARAMETERS: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "stream": False,
    "top_logprobs": None,
    "max_tokens": None,
    "seed": None,
    "stop": None,
}
# The engine's names for chat parameters, if they differ.
_CHAT_NAMES = {"top_logprobs": "logprobs", "max_tokens": "max_new_tokens"}
_STREAMING_CALL = "InvokeEndpointWithResponseStream"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def input_formatter(function: _Function) -> _Function:
    """Mark the function that creates a request from an `Input`."""
    return _marked(function, "is_input_formatter")


def prediction_handler(function: _Function) -> _Function:
    """Mark the function that runs the model. Unlike LMI, the server does not call it."""
    return _marked(function, "is_prediction_handler")


def init_handler(function: _Function) -> _Function:
    """Mark the function that loads the model. Unlike LMI, the server does not call it."""
    return _marked(function, "is_init_handler")


def _marked(function: _Function, mark: str) -> _Function:
    setattr(function, mark, True)
    return function


@dataclass
class ParsedInput:
    """The requests in a call."""

    errors: dict[int, str] = field(default_factory=dict)  # The parse errors, by the request's index in the batch.
    requests: list[Request] = field(default_factory=list)  # The parsed new requests.
    # All requests of the call. In a rolling batch, the requests of earlier calls come first and have no data.
    batch: list[Input] = field(default_factory=list)


def parse_input_with_formatter(inputs: Input, **kwargs: Any) -> ParsedInput:
    """Parse the new requests of a call with `configs.input_formatter`, or with `format_input` if there is none.

    Args:
        inputs: The call.
        kwargs: All arguments are passed to the formatter. `configs` has the model's settings, and can be a
            `Properties`. `rolling_batch` is required if `configs.rolling_batch` is set to a value other than `disable`.
            Other arguments can be, for example, `tokenizer` and `adapter_registry`.
    """
    configs = kwargs.get("configs")
    rolling_batch: Any = kwargs.get("rolling_batch")
    rolling = kwargs["is_rolling_batch"] = rolling_batch is not None if configs is None else _is_rolling(configs)
    if rolling and inputs.get_property("reset_rollingbatch"):
        rolling_batch.reset()
    parsed = ParsedInput(batch=inputs.get_batches())
    known = 0
    if rolling:  # Requests of earlier calls have no data. A new request may also have no data.
        known = min(sum(not item.get_as_bytes() for item in parsed.batch), len(rolling_batch.active_requests))
    for index, item in enumerate(parsed.batch[known:], known):
        try:
            formatter = getattr(configs, "input_formatter", None) or format_input
            request = formatter(item, **kwargs)
            request.request_id = rolling_batch.req_id_counter.next_id() if rolling else index
            request.client_request_id = item.get_property("requestId")
            request.tokenizer = kwargs.get("tokenizer")
            request.tgi_compat = bool(getattr(configs, "tgi_compat", False))
            request.server_parameters = dict(request.parameters)
            if rolling and item.contains_key("seed"):
                request.server_parameters.setdefault("seed", item.get_as_string("seed"))
            if request.output_formatter is None:
                request.output_formatter = getattr(configs, "output_formatter", None)
            parsed.requests.append(Request(request))
        except Exception as error:  # A custom formatter may raise any exception.
            logging.exception("Request %s cannot be parsed", item.get_property("requestId"))
            # The text of a KeyError is only the key.
            reason = f"Invalid Request Property: {error}" if isinstance(error, KeyError) else str(error)
            parsed.errors[index] = wire.sendable(f"Input Parsing failed. {reason}")
    return parsed


def format_input(input_item: Input, **kwargs: Any) -> TextInput:
    """Return the request for a body in LMI's schema, in the chat schema, or in Amazon Bedrock's schema.

    `configs.bedrock_compat` selects Amazon Bedrock's schema.

    Raises:
        ValueError: The body is malformed or names an adapter that is not registered.
    """
    document = decode(input_item, input_item.get_property("Content-Type"))
    configs = kwargs.get("configs")
    rolling = bool(kwargs.get("is_rolling_batch"))
    if rolling and isinstance(document, dict) and "messages" in document:
        request = _parse_chat(document, kwargs.get("tokenizer"))
    elif getattr(configs, "bedrock_compat", False):
        request = _parse_bedrock(document, input_item)
    elif rolling:
        prompt, parameters = parse_lmi_default_request_rolling_batch(document)
        request = TextInput(input_text=prompt, parameters=parameters)
    else:
        request = _parse_dynamic(document)
    if isinstance(document, dict) and "cached_prompt" in document:
        request.parameters["cached_prompt"] = document["cached_prompt"]
    if getattr(configs, "enable_lora", False):
        request.adapters = _adapters(request, document, input_item, kwargs.get("adapter_registry") or {})
    return request


def parse_lmi_default_request_rolling_batch(payload: Any) -> tuple[str, dict[str, Any]]:
    """Return the prompt and the parameters from a body in LMI's default schema.

    Raises:
        ValueError: The body, `inputs` or `parameters` is malformed.
    """
    if not isinstance(payload, dict):
        raise ValueError("Request payload should be a json object specifying the 'inputs' field")
    prompt, parameters = payload.get("inputs"), payload.get("parameters") or {}
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("The 'inputs' field must be a string that is not empty")
    return prompt, {**_object(parameters), "stream": bool(payload.get("stream", parameters.get("stream")))}


def _is_rolling(configs: Any) -> bool:
    chosen = getattr(configs, "rolling_batch", None)
    return (getattr(chosen, "value", chosen) or "disable") != "disable"


def _object(parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, dict):
        raise ValueError("'parameters' must be provided as an object of key-value pairs")
    return parameters


def _parse_dynamic(document: Any) -> TextInput:
    """Return the request. If the document has no `inputs`, all of it except `parameters` is the input."""
    if not isinstance(document, dict):
        return TextInput(input_text=document)
    parameters = _object(document.get("parameters") or {})
    rest = {name: value for name, value in document.items() if name != "parameters"}
    return TextInput(input_text=document.get("inputs", rest), parameters=parameters)


def _parse_chat(document: Mapping[str, Any], tokenizer: Any) -> TextInput:
    if not hasattr(tokenizer, "apply_chat_template"):
        raise ValueError(f"chat completions need a tokenizer with a chat template, not {type(tokenizer).__name__}")
    turns = [_turn(message) for message in document["messages"]]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    given = {name: document.get(name, default) for name, default in _CHAT_PARAMETERS.items()}
    parameters = {_CHAT_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    parameters["do_sample"] = (given["temperature"] or 0.0) > 0.0
    parameters |= {"details": True, "output_formatter": "jsonlines_chat" if given["stream"] else "json_chat"}
    return TextInput(input_text=prompt, parameters=parameters)


def _turn(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise ValueError("each of 'messages' must be an object with 'role' and 'content'")
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
    if not texts or not all(isinstance(part.get("text"), str) for part in parts):
        raise ValueError("the 'content' of a message must be text, or a list of texts; images are not read here")
    return {"role": message["role"], "content": "\n".join(part["text"] for part in parts)}


def _parse_bedrock(document: Any, item: Input) -> TextInput:
    if not isinstance(document, dict) or not isinstance(document.get("prompt"), str):
        raise ValueError("Request payload should be a json object with the string 'prompt'")
    streams = item.get_property("X-Amzn-SageMaker-Forwarded-Api") == _STREAMING_CALL
    temperature = document.get("temperature", 0.5)
    parameters: dict[str, Any] = {
        "details": True,
        "temperature": temperature,
        "top_p": document.get("top_p", 0.9),
        "max_new_tokens": document.get("max_gen_len", 512),
        "return_full_text": True,
        "output_formatter": "3p_stream" if streams else "3p",
    }
    if temperature > 0:
        parameters["do_sample"] = True
    if streams:
        parameters["stream"] = True
    return TextInput(input_text=document["prompt"], parameters=parameters)


def _adapters(request: TextInput, document: Any, item: Input, registry: Mapping[str, Any]) -> Any:
    """Return the registry's entries for the request's adapters, one for each input. A single entry is not in a list."""
    named = document.get("adapters") if isinstance(document, dict) else None
    if item.contains_key("adapter"):
        named = item.get_as_string("adapter")
    named = item.get_property(SAGEMAKER_ADAPTER_IDENTIFIER_HEADER) or named
    if not named:
        return None
    names = named if isinstance(named, list) else [named]
    for name in names:
        if name and name not in registry:
            shown = item.get_property("X-Amzn-SageMaker-Adapter-Alias") or name
            raise ValueError(f"Adapter {shown} is not registered")
    if len(names) != (len(request.input_text) if isinstance(request.input_text, list) else 1):
        raise ValueError("Number of adapters is not equal to the number of inputs")
    found = [registry.get(name) for name in names]
    return found[0] if len(found) == 1 else found
