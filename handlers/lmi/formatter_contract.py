"""A contract that calls a customer's formatters, for the rolling batch and the dynamic batch of LMI.

The input formatter reads the request, the output formatter writes the answer. A formatter may block, so all of this
runs in a thread. Source: LMI, "Custom input formatter schema" and "Custom output formatter schema".

The formatters of the asynchronous mode are in `handlers.lmi.async_formatters`.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from djl_python import Input
from djl_python.output_formatter import legacy_call_arguments
from djl_python.request_io import RequestInput, TextGenerationOutput, TextInput
from djl_python.request_io import Token as FormatterToken
from engines.errors import GenerationFailed, InvalidRequest, RequestError
from engines.model_settings import ModelSettings
from engines.request import Token, TokenDelta
from handlers.contract import JSON, Answer, Call, Contract, Exchange, Reply
from handlers.custom.formatters import Formatter
from handlers.custom.handler_input import input_of
from handlers.djl_errors import failed_dependency, payload_error
from handlers.lmi.body import read_body
from handlers.lmi.errors import failure, status_of
from handlers.lmi.rolling_batch import FINISH_REASONS

logger = logging.getLogger(__name__)

FAILED = "Custom formatter failed"

_BUILT_IN = frozenset({"json", "jsonlines", "sse"})
_STREAMING = frozenset({"jsonlines", "sse"})


class FormatterContract:
    """Calls a customer's formatters before and after another contract."""

    def __init__(
        self,
        contract: Contract,
        settings: ModelSettings,
        *,
        read: Formatter | None,
        write: Formatter | None,
        writes_tokens: bool = False,
        tokenizer: Any = None,
    ) -> None:
        """Create the contract.

        Args:
            contract: The contract that parses the request after the input formatter.
            settings: The model's settings.
            read: The input formatter.
            write: The output formatter.
            writes_tokens: The output formatter has the older form of LMI, which is called with each token.
            tokenizer: The value of the input formatter's argument `tokenizer`.
        """
        self._contract, self._settings = contract, settings
        self._read, self._write, self._writes_tokens = read, write, writes_tokens
        self._tokenizer = tokenizer
        self._keywords = accepted_keywords(read, self._keyword_values()) if read is not None else {}
        self._ids = itertools.count()

    def _keyword_values(self) -> dict[str, Any]:
        settings = self._settings
        configs = SimpleNamespace(
            model_id_or_path=settings.model_id,
            model_dir=str(settings.model_dir),
            rolling_batch=settings.rolling_batch,
            tgi_compat=settings.tgi_compat,
            output_formatter=settings.output_formatter,
            trust_remote_code=settings.trust_remote_code,
            revision=settings.revision,
        )
        return {
            "configs": configs,
            "tokenizer": self._tokenizer,
            "adapter_registry": {},
            "model_config": None,
            "peft_config": None,
            "rolling_batch": None,
            "image_placeholder_token": None,
            "is_rolling_batch": settings.rolling_batch != "disable",
        }

    def parse(self, call: Call) -> Exchange:
        request = (
            self._read_without_formatter(call) if self._read is None else self._read_by_formatter(self._read, call)
        )
        if request is None:
            return self._contract.parse(call)  # This reports the fault.
        self._complete(request, call)
        formatter = request.output_formatter if isinstance(request.output_formatter, str) else None
        write = self._write if formatter not in _BUILT_IN else None
        stream = bool(request.parameters.get("stream")) or formatter in _STREAMING
        document = _document(request, formatter, stream, own_answer=write is not None)
        exchange = self._contract.parse(
            Call(
                body=document,
                content_type=JSON,
                request_id=call.request_id,
                headers=call.headers,
                query=call.query,
                steering=call.steering,
            )
        )
        if write is None:
            return exchange
        if len(exchange.requests) > 1:
            raise failed_dependency(
                "an array of inputs cannot be answered by the model's output formatter; send one at a time"
            )
        asked = msgspec.structs.replace(
            exchange.requests[0], stream=True, want_tokens=True, want_logprobs=self._settings.token_logprobs, memo=None
        )
        answer = FormatterAnswer(write, request, stream, self._writes_tokens)
        return Exchange((asked,), answer, exchange.notes, names=exchange.names)

    def _read_by_formatter(self, read: Formatter, call: Call) -> RequestInput:
        try:
            request = read(handler_input(call), **self._keywords)
        except Exception as error:
            logger.exception("the input formatter failed", extra={"request_id": call.request_id})
            raise failed_dependency(f"{FAILED}: {error}") from None
        if not isinstance(request, RequestInput):
            kind = type(request).__name__
            raise failed_dependency(f"{FAILED}: the input formatter returned {kind}; expected a RequestInput")
        if not isinstance(request.parameters, dict):
            kind = type(request.parameters).__name__
            raise failed_dependency(f"{FAILED}: `parameters` must be a dict, got {kind}")
        return request

    def _read_without_formatter(self, call: Call) -> RequestInput | None:
        """Return the request in a body, or None if the body is wrong."""
        try:
            body = read_body(call, lambda _: ())
            document, parameters = body.document, body.parameters
            if document.get("stream") is not None:
                parameters["stream"] = document["stream"]
            if not isinstance(parameters.get("stream"), bool | None):
                return None
        except InvalidRequest:
            return None
        return TextInput(parameters=parameters, input_text=document.get("inputs"), adapters=document.get("adapters"))

    def _complete(self, request: RequestInput, call: Call) -> None:
        parameters = request.parameters
        request.request_id = next(self._ids)
        request.client_request_id = call.request_id
        request.tgi_compat = self._settings.tgi_compat
        formatter = parameters.get("output_formatter", request.output_formatter or self._settings.output_formatter)
        request.output_formatter = self._write if formatter is None and self._write is not None else formatter
        seed = parameters.get("seed")
        own = {"seed": random.getrandbits(31) if seed is None else seed, "output_formatter": request.output_formatter}
        request.server_parameters = {**parameters, **own}
        if isinstance(request, TextInput):
            request.tokenizer = self._tokenizer


def handler_input(call: Call) -> Input:
    """Return the call as the `Input` that LMI gives to handlers and formatters."""
    _, properties, contents = input_of(call)
    given = Input()
    given.properties = dict(properties)
    for key, value in contents:
        given.content.add(key, value)
    return given


def _document(request: RequestInput, formatter: str | None, stream: bool, own_answer: bool) -> bytes:
    """Return the request as a body for the wrapped contract.

    Args:
        request: The request.
        formatter: The name of a built-in output formatter.
        stream: The client asked for a stream.
        own_answer: The customer's output formatter writes the answer. It gets all details.
    """
    parameters = {
        name: value for name, value in request.parameters.items() if name not in ("stream", "output_formatter")
    }
    parameters["seed"] = request.server_parameters["seed"]
    if own_answer:
        parameters["details"] = True
    elif formatter is not None:
        parameters["output_formatter"] = formatter
    document: dict[str, Any] = {"inputs": getattr(request, "input_text", None), "parameters": parameters}
    if (adapters := getattr(request, "adapters", None)) is not None:
        document["adapters"] = adapters
    if stream and not own_answer:
        document["stream"] = True
    try:
        return msgspec.json.encode(document)
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        raise failed_dependency(f"{FAILED}: `input_text` or `parameters` cannot be used: {error}") from None


def accepted_keywords(function: Formatter, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered keyword arguments that a function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    names = {parameter.name for parameter in list(parameters)[1:]}
    return {name: value for name, value in offered.items() if name in names}


class FormatterAnswer(Answer):
    """An answer that an output formatter writes. It has no content type, as in LMI.

    A formatter of the newer form is called with the whole output. If the answer is streamed, it is called as long as
    the output has unread tokens, otherwise once for each delta. A formatter of the older form is called with each
    token.
    """

    content_type = ""

    def __init__(self, write: Formatter, request: RequestInput, stream: bool, by_token: bool) -> None:
        self._write, self._request, self._stream, self._by_token = write, request, stream, by_token
        self._output = TextGenerationOutput(request_id=request.request_id, input=request)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the formatter's text.

        Raises:
            GenerationFailed: The formatter raised an error, or returned a value that is not text.
        """
        self._take(delta)
        try:
            return "".join(self._by_tokens() if self._by_token else self._by_output()).encode()
        except Exception as error:
            logger.exception("the output formatter failed", extra={"request_id": self._request.client_request_id})
            raise GenerationFailed(f"{FAILED}: {error}") from None

    def fail(self, error: RequestError) -> Reply:
        return failure(error, payload_error(error.message, status_of(error)))

    def fail_midway(self, error: RequestError) -> bytes:
        return payload_error(error.message, status_of(error))

    def _take(self, delta: TokenDelta) -> None:
        output, reason, tokens = self._output, delta.finish_reason, delta.tokens
        if reason is not None and not tokens:
            tokens = [Token(-1, "")]
        for place, token in enumerate(tokens):
            last = reason is not None and place == len(tokens) - 1
            output.set_next_token(
                _token(token), delta.sequence, last, FINISH_REASONS[reason] if last and reason else None
            )
            if token.top:
                output.set_next_top_tokens([_token(one) for one in token.top], delta.sequence)
        if delta.cumulative_logprob is not None:
            output.sequences[delta.sequence].cumulative_log_prob = delta.cumulative_logprob
        if delta.prompt_tokens is not None:
            output.prompt_tokens_details = [_token(token) for token in delta.prompt_tokens]
        if delta.last:
            output.other_sequences_indices = sorted(output.sequences.keys() - {output.best_sequence_index})
            output.finished = True

    def _by_output(self) -> list[str]:
        if not self._stream:
            return [self._text(self._write(self._output))]
        sequence = self._output.best_sequence
        texts = []
        while sequence.has_next_token():
            before = sequence.unread
            texts.append(self._text(self._write(self._output)))
            if sequence.unread == before:
                raise ValueError("the output formatter must read tokens with get_next_token() when it streams")
        return texts

    def _by_tokens(self) -> list[str]:
        sequence, texts = self._output.best_sequence, []
        while sequence.has_next_token():
            texts.append(self._text(self._write(*legacy_call_arguments(self._output, sequence.advance()))))
        return texts

    @staticmethod
    def _text(value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        raise TypeError(f"the output formatter returned {type(value).__name__}; expected str")


def _token(token: Token) -> FormatterToken:
    return FormatterToken(token.id, token.text, token.logprob, True if token.special else None)
