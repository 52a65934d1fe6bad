"""A contract that calls a customer's formatters, for LMI's rolling batch and dynamic batch.

The input formatter reads the request, and the output formatter writes the answer. Formatters may block, so they run in
a thread. Source: LMI, "Custom input formatter schema" and "Custom output formatter schema".

The formatters of the asynchronous mode are in `handlers.lmi.formatters.async_formatters`.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec

from djl_python.output_formatter import legacy_call_arguments
from djl_python.request_io import RequestInput, TextGenerationOutput, TextInput
from djl_python.request_io import Token as FormatterToken
from engines.errors import GenerationFailed, InvalidRequest, RequestError
from engines.request import Token, TokenDelta
from handlers.answers.token_answer import FINISH_REASONS
from handlers.contract import JSON, Answer, Call, Contract, Exchange, Reply
from handlers.custom.formatters import Formatter, Formatters
from handlers.custom.handler_input import sdk_input
from handlers.djl_errors import failed_dependency, payload_error
from handlers.formatter_thread import FAILED
from handlers.lmi.body import read_body
from handlers.lmi.errors import failure, status_of
from handlers.model_config import ModelConfig

logger = logging.getLogger(__name__)

_BUILT_IN = frozenset({"json", "jsonlines", "sse"})
_STREAMING = frozenset({"jsonlines", "sse"})


class FormatterContract:
    """Calls a customer's formatters before and after another contract."""

    def __init__(self, contract: Contract, config: ModelConfig, formatters: Formatters, tokenizer: Any) -> None:
        """Create the contract.

        Args:
            contract: The contract that parses the request after the input formatter.
            config: The model's settings.
            formatters: The formatters.
            tokenizer: The value of the input formatter's argument `tokenizer`.
        """
        self._contract, self._config, self._tokenizer = contract, config, tokenizer
        self._by_token = formatters.output_takes_tokens
        self._formatters = formatters.offering(
            configs=SimpleNamespace(
                model_id_or_path=config.model_id,
                model_dir=str(config.model_dir),
                rolling_batch=config.rolling_batch,
                tgi_compat=config.lmi.tgi_compat,
                output_formatter=config.lmi.output_formatter,
                trust_remote_code=config.trust_remote_code,
                revision=config.revision,
            ),
            tokenizer=tokenizer,
            adapter_registry={},
            model_config=None,
            peft_config=None,
            rolling_batch=None,
            image_placeholder_token=None,
            is_rolling_batch=config.rolling_batch != "disable",
        )
        self._ids = itertools.count()

    def parse(self, call: Call) -> Exchange:
        request = self._read(call)
        if request is None:
            return self._contract.parse(call)  # This call reports the error.
        self._complete(request, call)
        formatter = request.output_formatter if isinstance(request.output_formatter, str) else None
        write = None if formatter in _BUILT_IN else self._formatters.output
        stream = bool(request.parameters.get("stream")) or formatter in _STREAMING
        document = _document(request, formatter, stream, write is not None)
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
            exchange.requests[0],
            stream=True,
            want_tokens=True,
            want_logprobs=self._config.lmi.token_logprobs,
            memo=None,
        )
        return Exchange(
            (asked,),
            FormatterAnswer(write, request, stream=stream, by_token=self._by_token),
            exchange.notes,
            names=exchange.names,
        )

    def _read(self, call: Call) -> RequestInput | None:
        """Return the request that the input formatter makes. Without an input formatter, read the body.

        Returns:
            None if the body is invalid.
        """
        if self._formatters.input is None:
            try:
                body = read_body(call, lambda _: ())
            except InvalidRequest:
                return None
            document, parameters = body.document, body.parameters
            if document.get("stream") is not None:
                parameters["stream"] = document["stream"]
            if not isinstance(parameters.get("stream"), bool | None):
                return None
            return TextInput(
                parameters=parameters, input_text=document.get("inputs"), adapters=document.get("adapters")
            )
        try:
            request = self._formatters.input(sdk_input(call))
            if not isinstance(request, RequestInput):
                raise TypeError(f"the input formatter returned {type(request).__name__}; expected a RequestInput")
            if not isinstance(request.parameters, dict):
                raise TypeError(f"`parameters` must be a dict, got {type(request.parameters).__name__}")
        except Exception as error:
            logger.exception("the input formatter failed", extra={"request_id": call.request_id})
            raise failed_dependency(f"{FAILED}: {error}") from None
        return request

    def _complete(self, request: RequestInput, call: Call) -> None:
        parameters, write = request.parameters, self._formatters.output
        request.request_id = next(self._ids)
        request.client_request_id = call.request_id
        request.tgi_compat = self._config.lmi.tgi_compat
        formatter = parameters.get("output_formatter", request.output_formatter or self._config.lmi.output_formatter)
        request.output_formatter = write if formatter is None and write is not None else formatter
        seed = parameters.get("seed")
        own = {"seed": random.getrandbits(31) if seed is None else seed, "output_formatter": request.output_formatter}
        request.server_parameters = {**parameters, **own}
        if isinstance(request, TextInput):
            request.tokenizer = self._tokenizer


def _document(request: RequestInput, formatter: str | None, stream: bool, formatted: bool) -> bytes:
    """Return the request as a body for the wrapped contract.

    Args:
        request: The request.
        formatter: The name of a built-in output formatter.
        stream: True if the client asked for a stream.
        formatted: True if the customer's output formatter writes the answer. The formatter then gets all details.
    """
    parameters = {
        name: value for name, value in request.parameters.items() if name not in ("stream", "output_formatter")
    }
    parameters["seed"] = request.server_parameters["seed"]
    if formatted:
        parameters["details"] = True
    elif formatter is not None:
        parameters["output_formatter"] = formatter
    document: dict[str, Any] = {"inputs": getattr(request, "input_text", None), "parameters": parameters}
    if (adapters := getattr(request, "adapters", None)) is not None:
        document["adapters"] = adapters
    if stream and not formatted:
        document["stream"] = True
    try:
        return msgspec.json.encode(document)
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        raise failed_dependency(f"{FAILED}: `input_text` or `parameters` cannot be used: {error}") from None


class FormatterAnswer(Answer):
    """An answer that an output formatter writes. As in LMI, the answer has no content type.

    A formatter of the newer form gets all output so far. If the answer is streamed, the formatter is called after
    each delta, again and again until it has read all tokens so far. If the answer is not streamed, the formatter is
    called once after each delta. A formatter of the older form is called with each token.
    """

    content_type = ""
    blocks = True

    def __init__(self, write: Formatter, request: RequestInput, *, stream: bool, by_token: bool) -> None:
        self._write, self._by_token = write, by_token
        self._request, self._stream = request, stream
        self._output = TextGenerationOutput(request_id=request.request_id, input=request)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the formatter's text.

        Raises:
            GenerationFailed: The formatter raised an error, or returned a value that is not text.
        """
        self._add(delta)
        try:
            return "".join(self._texts()).encode()
        except Exception as error:
            logger.exception("the output formatter failed", extra={"request_id": self._request.client_request_id})
            raise GenerationFailed(f"{FAILED}: {error}") from None

    def fail(self, error: RequestError) -> Reply:
        return failure(error, self.fail_midway(error))

    def fail_midway(self, error: RequestError) -> bytes:
        return payload_error(error.message, status_of(error))

    def _add(self, delta: TokenDelta) -> None:
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

    def _texts(self) -> Iterator[str]:
        sequence = self._output.best_sequence
        if not self._by_token and not self._stream:
            yield self._text(self._output)
            return
        while unread := sequence.unread:
            if self._by_token:
                yield self._text(*legacy_call_arguments(self._output, sequence.advance()))
                continue
            yield self._text(self._output)
            if sequence.unread == unread:
                raise ValueError("the output formatter must read tokens with get_next_token() when it streams")

    def _text(self, *given: Any) -> str:
        text = self._write(*given)
        if isinstance(text, str | None):
            return text or ""
        raise TypeError(f"the output formatter returned {type(text).__name__}; expected str")


def _token(token: Token) -> FormatterToken:
    return FormatterToken(token.id, token.text, token.logprob, True if token.special else None)
