"""The bodies of OpenAI's API that Slipway's contract reads. They have the fields that most clients send.

A body that does not fit is not an error. It goes to vLLM's serving classes, which answer or refuse it. The meaning of a
field in this module does not depend on the other fields of the body, with few exceptions: `max_completion_tokens`
replaces `max_tokens`, `top_logprobs` needs `logprobs`, and `continuous_usage_stats` needs `include_usage`. The type of
a field accepts only values that vLLM's type of the field also accepts. Source: vLLM,
`entrypoints/openai/chat_completion/protocol.py` and `entrypoints/openai/completion/protocol.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from engines.request import Constraint, SamplingParameters
from handlers.parsing.json_fields import MAX_INT64, MAX_STRING_LENGTH, MAX_STRINGS, MIN_INT64
from handlers.parsing.json_limits import JsonDecoder

Int = Annotated[int, msgspec.Meta(ge=MIN_INT64, le=MAX_INT64)]
_Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT64)]

_CONSTRAINT = "structured_outputs"  # Errors use this name for a constraint in any field.
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}").fullmatch
_SAMPLING_DEFAULTS = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}


class LeftToVllm(Exception):
    """vLLM's serving classes have to answer this body. The message says why."""


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object without unknown fields."""


class StreamOptions(_Strict, kw_only=True):
    """The options for the usage in a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _JsonSchema(_Strict, kw_only=True):
    name: str
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(_Strict, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StructuredOutputs(_Strict, kw_only=True):
    json: msgspec.Raw = msgspec.Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _TextPart(_Strict, kw_only=True):
    type: Literal["text"]
    text: str


class Message(_Strict, kw_only=True):
    """A text message of a chat.

    In a text message, the fields of other kinds of messages must be null. Null counts as absent.
    """

    role: Literal["system", "user", "assistant"]
    content: str | list[_TextPart]
    name: str | None = None
    tool_calls: None = None
    tool_call_id: None = None
    function_call: None = None
    refusal: None = None


class Body(_Strict, kw_only=True, omit_defaults=True):
    """The fields that completions and chats share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[Int] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] = []
    min_tokens: _Natural = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | msgspec.UnsetType = msgspec.UNSET
    spaces_between_special_tokens: bool = True
    response_format: _ResponseFormat | None = None
    structured_outputs: _StructuredOutputs | None = None


class CompletionBody(Body, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | _Natural | list[_Natural]]
    max_tokens: _Positive | None = 16
    n: _Positive = 1
    logprobs: _Natural | None = None
    suffix: Literal[""] | None = None


class ChatBody(Body, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    n: _Positive | None = 1
    logprobs: bool | None = False
    top_logprobs: _Natural | None = 0


read_completion = JsonDecoder(CompletionBody).decode
read_chat = JsonDecoder(ChatBody).decode


def sampling_of(body: Body, defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParameters:
    """Return the sampling parameters of a body.

    Args:
        defaults: The model's own default parameters, by vLLM's names.

    Raises:
        LeftToVllm: A parameter may have a value that vLLM refuses or changes.
    """
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STRINGS or any(len(text) > MAX_STRING_LENGTH for text in stop):
        raise LeftToVllm("stop")
    numbers = {
        name: value if (value := getattr(body, name)) is not None else defaults.get(name, default)
        for name, default in _SAMPLING_DEFAULTS.items()
    }
    return SamplingParameters(
        **numbers,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        seed=body.seed,
        stop=stop,
        stop_token_ids=tuple(dict.fromkeys((*(body.stop_token_ids or ()), *(defaults.get("stop_token_ids") or ())))),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        # Only vLLM 0.33 reads the default of this parameter from the model.
        skip_special_tokens=defaults.get("skip_special_tokens", True)
        if body.skip_special_tokens is msgspec.UNSET
        else body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        bad_words=tuple(body.bad_words),
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=tuple(body.allowed_token_ids) if body.allowed_token_ids is not None else None,
        constraint=_constraint(body),
    )


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    if not all(map(_TOKEN_ID, given)) or not all(map(math.isfinite, given.values())):
        raise LeftToVllm("logit_bias")
    return {int(token_id): min(100.0, max(-100.0, bias)) for token_id, bias in given.items()}


def _constraint(body: Body) -> Constraint | None:
    form, outputs = body.response_format, body.structured_outputs
    if (body.min_tokens or body.ignore_eos) and (form is not None or outputs is not None):
        raise LeftToVllm("a constraint beside what forbids the end of the text")
    if form is not None and form.json_schema is not None and form.type != "json_schema":
        raise LeftToVllm("response_format")
    if form is None or form.type == "text":
        return None if outputs is None else _structured(outputs)
    if outputs is not None:
        raise LeftToVllm("response_format with structured_outputs")
    if form.type == "json_object":
        return Constraint(parameter=_CONSTRAINT, json_object=True, as_is=True)
    if form.json_schema is None or not bytes(form.json_schema.schema).startswith(b"{"):
        raise LeftToVllm("response_format")
    return Constraint(
        parameter=_CONSTRAINT,
        json_schema=bytes(form.json_schema.schema).decode(),
        as_is=True,
        strict=bool(form.json_schema.strict),
    )


def _structured(outputs: _StructuredOutputs) -> Constraint:
    schema = bytes(outputs.json).decode()
    kinds = (
        outputs.regex,
        outputs.choice,
        outputs.grammar,
        outputs.json_object,
        None if schema in ("", "null") else schema,
    )
    given = [kind for kind in kinds if kind is not None]
    if len(given) != 1 or not given[0] or (given[0] is schema and not schema.startswith("{")):
        raise LeftToVllm("structured_outputs")
    return Constraint(
        parameter=_CONSTRAINT,
        json_schema=schema if given[0] is schema else None,
        regex=outputs.regex,
        choice=None if outputs.choice is None else tuple(outputs.choice),
        grammar=outputs.grammar,
        json_object=outputs.json_object is True,
        as_is=True,
    )
