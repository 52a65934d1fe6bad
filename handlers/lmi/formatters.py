"""LMI's contract with a customer's formatters around it: theirs read the request, write the answer, or both.

`FormatterContract` calls those of the rolling batch and of the dynamic batch, `PayloadFormatters` those of the
asynchronous mode. Source: LMI, "Custom input formatter schema" and "Custom output formatter schema"; djl_python,
`lmi_vllm/vllm_async_service.py`. A formatter may block, so all of this runs in a thread.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec

from djl_python import Input
from djl_python.encode_decode import decode as decode_as_lmi
from djl_python.output_formatter import legacy_call_arguments
from djl_python.request_io import RequestInput, TextGenerationOutput, TextInput
from djl_python.request_io import Token as FormatterToken
from engines.errors import GenerationFailed, InvalidRequest, RequestError
from engines.model_settings import ModelSettings
from engines.request import Token, TokenDelta
from handlers.contract import Answer, Call, Contract, Exchange, Reply
from handlers.custom.handler_input import input_of
from handlers.djl_errors import JSON, failed_dependency, payload_error
from handlers.forms import is_form, media_type
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.body import decode, read_body
from handlers.lmi.errors import failure, payload_refused, status_of
from handlers.lmi.rolling_batch import FINISH_REASONS

logger = logging.getLogger(__name__)

FAILED = "Custom formatter failed"

Formatter = Callable[..., Any]

_BUILT_IN = frozenset({"json", "jsonlines", "sse"})
_STREAMING = frozenset({"jsonlines", "sse"})


class FormatterContract:
    """Another contract with a customer's formatters around it."""

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
        """Wrap `contract`.

        `read` and `write` are the input and the output formatter; `writes_tokens`: the latter is of the older kind,
        called with each token.

        Args:
            tokenizer: What an input formatter gets under this name.
        """
        self._contract, self._settings = contract, settings
        self._read, self._write, self._writes_tokens = read, write, writes_tokens
        self._tokenizer = tokenizer
        self._keywords = _accepted(read, self._offered()) if read is not None else {}
        self._ids = itertools.count()

    def _offered(self) -> dict[str, Any]:
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
        request = self._read_as_usual(call) if self._read is None else self._read_by_formatter(self._read, call)
        if request is None:
            return self._contract.parse(call)  # which reports the fault
        self._complete(request, call)
        formatter = request.output_formatter if isinstance(request.output_formatter, str) else None
        write = self._write if formatter not in _BUILT_IN else None
        stream = bool(request.parameters.get("stream")) or formatter in _STREAMING
        document = _document(request, formatter, stream, own_answer=write is not None)
        exchange = self._contract.parse(
            Call(body=document, content_type=JSON, request_id=call.request_id, headers=call.headers, query=call.query)
        )
        if write is None:
            return exchange
        if len(exchange.requests) > 1:
            raise failed_dependency(
                "an array of inputs cannot be answered by the model's output formatter; send one at a time"
            )
        asked = msgspec.structs.replace(
            exchange.requests[0], stream=True, want_tokens=True, want_logprobs=self._settings.token_logprobs
        )
        answer = FormatterAnswer(write, request, stream, self._writes_tokens)
        return Exchange((asked,), answer, exchange.notes)

    def _read_by_formatter(self, read: Formatter, call: Call) -> RequestInput:
        try:
            request = read(_handler_input(call), **self._keywords)
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

    def _read_as_usual(self, call: Call) -> RequestInput | None:
        """Return the request of a body without an input formatter; None if the body is wrong."""
        try:
            body = read_body(call, lambda _: ())
            document, parameters = body.document, body.parameters
            if "stream" in document:
                parameters["stream"] = document["stream"]
            if not isinstance(parameters.get("stream", False), bool):
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


def _handler_input(call: Call) -> Input:
    properties, contents = input_of(call)
    given = Input()
    given.properties = dict(properties)
    for key, value in contents:
        given.content.add(key, value)
    return given


def _document(request: RequestInput, formatter: str | None, stream: bool, own_answer: bool) -> bytes:
    """Return the request as the wrapped contract reads it.

    Args:
        own_answer: The output formatter writes it, from all details.
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


def _accepted(function: Formatter, offered: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    names = {parameter.name for parameter in list(parameters)[1:]}
    return {name: value for name, value in offered.items() if name in names}


class FormatterAnswer(Answer):
    """The output formatter's texts for the deltas; without a content type, as in LMI.

    The newer kind of formatter is called with the whole output: while it has unread tokens if the answer is streamed,
    else once for each engine step. The older kind is called with each token.
    """

    content_type = ""

    def __init__(self, write: Formatter, request: RequestInput, stream: bool, by_token: bool) -> None:
        self._write, self._request, self._stream, self._by_token = write, request, stream, by_token
        self._output = TextGenerationOutput(request_id=request.request_id, input=request)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the formatter's text.

        Raises:
            GenerationFailed: The formatter raised an error, or returned something else than text.
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


class PayloadFormatters:
    """A customer's formatters of the asynchronous mode: one changes a body before it is parsed, one vLLM's answer."""

    def __init__(
        self, contract: LmiAsyncContract, *, read: Formatter | None, write: Formatter | None, tokenizer: Any = None
    ) -> None:
        """`read` and `write`: the input and the output formatter.

        Args:
            tokenizer: What `read` gets under this name.
        """
        self._contract, self._read, self._write = contract, read, write
        self._keywords = _accepted(read, {"tokenizer": tokenizer}) if read is not None else {}
        self.writes = write is not None  # There is an output formatter.

    def read(self, call: Call) -> Call:
        """Return the call with the body that the input formatter returns.

        As in LMI the formatter does not see `adapters`, which has been taken out by then.

        Raises:
            ContractError: The body cannot be decoded, or the formatter failed.
        """
        if self._read is None:
            return call
        document = _decoded(call)
        adapters = document.pop("adapters", None) if isinstance(document, dict) else None
        try:
            document = self._read(document, **self._keywords)
            if not isinstance(document, dict):
                raise TypeError(f"the input formatter returned {type(document).__name__}; expected dict")
            if adapters is not None:
                document.setdefault("adapters", adapters)
            body = json.dumps(document).encode()
        except Exception as error:
            logger.exception("the input formatter failed", extra={"request_id": call.request_id})
            raise failed_dependency(f"{FAILED}: {error}") from None
        return replace(call, body=body, content_type=JSON)

    def as_completion(self, call: Call) -> Call:
        """Return a call with `inputs` as one to vLLM's completions, so that its answer is vLLM's.

        Raises:
            ContractError: The call is refused.
        """
        completion, notes = self._contract.as_completion(call)
        for note in notes:
            logger.info("%s", note, extra={"request_id": call.request_id})
        return completion

    def written(self, response: Any) -> bytes:
        """Return the output formatter's line for vLLM's response, or for one event of its stream.

        Raises GenerationFailed: the formatter raised an error, or returned something that cannot be sent.
        """
        assert self._write is not None
        try:
            return _line(self._write(response))
        except Exception as error:
            logger.exception("the output formatter failed")
            raise GenerationFailed(f"{FAILED}: {error}") from None


def _decoded(call: Call) -> Any:
    kind = media_type(call.content_type)
    try:
        if "json" in kind or is_form(kind) or kind in ("", "application/octet-stream"):
            return decode(call.body, "" if "json" in kind else call.content_type)
        return decode_as_lmi(_handler_input(call), call.content_type)
    except InvalidRequest as error:
        raise payload_refused(error.message) from None
    except (ValueError, KeyError, ImportError) as error:
        raise payload_refused(f"the body is not valid {kind}: {error}") from None


def _line(value: Any) -> bytes:
    if hasattr(value, "model_dump_json"):
        value = value.model_dump_json()
    elif hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise TypeError(f"the output formatter returned {type(value).__name__}; expected dict, str or a response")
    return value.encode("utf-8", "replace") + b"\n"
