"""LMI's rolling-batch contract: `/invocations` and `/predictions/<model>` with `inputs`, `parameters` and `stream`.

Source: LMI schema v0.31, Rolling Batch/Continuous Batch Schema; contracts/lmi.md sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring as quote
from math import isfinite
from typing import Any

import msgspec

from handlers.contracts.json_fields import json_kind
from handlers.contracts.lmi.adapters import adapters_of
from handlers.contracts.lmi.body import BodyError, decode_object
from handlers.contracts.lmi.errors import (
    FAILED_DEPENDENCY,
    JSON,
    overloaded,
    payload_error,
    payload_refused,
    request_error,
    status_of,
    stream_error,
    tgi_error_type,
    unknown_adapter,
)
from handlers.contracts.lmi.parameters import LmiParameters, ParameterRules, read_parameters
from handlers.contracts.protocol import Answer, Call, ContractError, Exchange, Reply
from handlers.errors import InvalidParameter, InvalidRequest, Overloaded, RequestError, UnknownAdapter
from handlers.model_settings import ModelSettings
from handlers.request import FinishReason, GenerationRequest, Token, TokenDelta

FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
_NO_TOKEN = Token(-1, "")


class Show:
    """What one answer shows, from the request's parameters and the model's settings."""

    __slots__ = ("details", "full_text", "overload_status", "prefill", "several", "tgi", "top_tokens")

    def __init__(
        self,
        *,
        details: bool = False,
        full_text: bool = False,
        prefill: bool = False,
        top_tokens: bool = False,
        several: bool = False,
        tgi: bool = False,
        overload_status: int = 503,
    ) -> None:
        self.details = details or several
        self.full_text = full_text
        self.prefill = prefill
        self.top_tokens = top_tokens
        self.several = several
        self.tgi = tgi
        self.overload_status = overload_status


class _Sequence:
    """One generated sequence, as far as it has come."""

    __slots__ = ("count", "finish_reason", "prompt_tokens", "text", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[Token] = []
        self.prompt_tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self.count = 0

    def add(self, delta: TokenDelta) -> None:
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
        self.finish_reason, self.count = delta.finish_reason, delta.token_count


class JsonAnswer:
    """One JSON document when everything has finished; an array of them where the client sent an array of prompts."""

    content_type = JSON
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, prompts: Sequence[str], show: Show, in_array: bool) -> None:
        self._prompts = prompts
        self._show = show
        self._in_array = in_array or show.tgi
        self._sequences: list[dict[int, _Sequence]] = [{} for _ in prompts]
        self._open = len(prompts)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        self._sequences[prompt].setdefault(delta.sequence, _Sequence()).add(delta)
        self._open -= delta.last
        return b"" if self._open else self._body().encode()

    def fail(self, error: RequestError) -> Reply:
        if isinstance(error, Overloaded):
            return overloaded(error, self._show.overload_status)
        if isinstance(error, UnknownAdapter):
            return unknown_adapter(error)
        status = status_of(error)
        kind = tgi_error_type(error) if self._show.tgi else None
        return Reply(status, JSON, request_error(error.message, status, kind).encode())

    def fail_midway(self, error: RequestError) -> bytes:
        """Never comes to it: the body is sent whole."""
        return b""

    def _body(self) -> str:
        documents = [self._document(*pair) for pair in zip(self._prompts, self._sequences, strict=True)]
        return f"[{', '.join(documents)}]" if self._in_array else documents[0]

    def _document(self, prompt: str, sequences: dict[int, _Sequence]) -> str:
        show, (best, *others) = self._show, [sequences[rank] for rank in sorted(sequences)]
        text = f'{{"generated_text": {quote(_text(prompt, best, show))}'
        if not show.details:
            return text + "}"
        if show.several:
            details = f'"inputs": {quote(prompt)}, {_counts(best)}, {_token_lists(best, show)}'
            if others:
                rest = ", ".join(self._other(prompt, other) for other in others)
                details += f', "best_of_sequences": [{rest}]'
        else:
            details = f'{_counts(best)}, "inputs": {quote(prompt)}, {_token_lists(best, show)}'
        return f'{text}, "details": {{{details}}}}}'

    def _other(self, prompt: str, sequence: _Sequence) -> str:
        text = quote(_text(prompt, sequence, self._show))
        return f'{{{_counts(sequence)}, {_token_lists(sequence, self._show)}, "generated_text": {text}}}'


class RecordAnswer:
    """A record for each token, as a line or as a server-sent event; the last one carries the whole text."""

    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, prompt: str, show: Show, sse: bool) -> None:
        self.content_type = "text/event-stream" if sse else "application/jsonlines"
        self._prompt = prompt
        self._show = show
        self._before, self._after = ("data: ", "\n\n") if sse else ("", "\n")
        self._head = self._before + '{"token": '
        self._sequence = _Sequence()
        self._top: list[Token] = []

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """See `Answer.feed`. The hot path: called for each token of each stream."""
        if delta.sequence:
            return b""
        sequence, tokens = self._sequence, delta.tokens
        sequence.text.append(delta.text)
        if self._show.top_tokens:
            sequence.tokens.extend(tokens)
        if delta.prompt_tokens is not None:
            sequence.prompt_tokens = delta.prompt_tokens
        if not delta.last:
            if len(tokens) == 1:
                return (self._record(tokens[0]) + "}" + self._after).encode()
            return "".join([self._record(token) + "}" + self._after for token in tokens]).encode()
        sequence.finish_reason, sequence.count = delta.finish_reason, delta.token_count
        *earlier, final = tokens or [_NO_TOKEN]
        records = [self._record(token) + "}" + self._after for token in earlier]
        return ("".join(records) + self._record(final) + self._end()).encode()

    def fail(self, error: RequestError) -> Reply:
        """See `Answer.fail`. Nothing has been streamed, so the record comes as a JSON document."""
        if isinstance(error, Overloaded):
            return overloaded(error, self._show.overload_status)
        if isinstance(error, UnknownAdapter):
            return unknown_adapter(error)
        return Reply(status_of(error), JSON, self._error(error).encode())

    def fail_midway(self, error: RequestError) -> bytes:
        return (self._before + self._error(error) + self._after).encode()

    def _error(self, error: RequestError) -> str:
        kind = tgi_error_type(error) if self._show.tgi else None
        return stream_error(error.message, status_of(error), kind)

    def _record(self, token: Token) -> str:
        """A record up to where the token's own object has closed."""
        return self._head + _token(token, self._show)

    def _end(self) -> str:
        sequence, show = self._sequence, self._show
        end = f', "generated_text": {quote(_text(self._prompt, sequence, show))}'
        if show.details:
            details = f'{_counts(sequence)}, "inputs": {quote(self._prompt)}{_prompt_and_top(sequence, show)}'
            end += f', "details": {{{details}}}'
        return end + "}" + self._after


def _text(prompt: str, sequence: _Sequence, show: Show) -> str:
    text = "".join(sequence.text)
    return prompt + text if show.full_text else text


def _counts(sequence: _Sequence) -> str:
    reason = f'"{FINISH_REASONS[sequence.finish_reason]}"' if sequence.finish_reason else "null"
    return f'"finish_reason": {reason}, "generated_tokens": {sequence.count}'


def _token_lists(sequence: _Sequence, show: Show) -> str:
    return f'"tokens": {_tokens(sequence.tokens, show)}{_prompt_and_top(sequence, show)}'


def _prompt_and_top(sequence: _Sequence, show: Show) -> str:
    text = ""
    if show.prefill:
        text += f', "prefill": {_tokens(sequence.prompt_tokens, show)}'
    if show.top_tokens:
        lists = ", ".join(_tokens(token.top, show) for token in sequence.tokens)
        text += f', "top_tokens": [{lists}]'
    return text


def _tokens(tokens: Sequence[Token], show: Show) -> str:
    return f"[{', '.join(_token(token, show) for token in tokens)}]"


def _token(token: Token, show: Show) -> str:
    number = "null" if token.logprob is None or not isfinite(token.logprob) else repr(token.logprob)
    key, special_key = ("logprob", "special") if show.tgi else ("log_prob", "special_token")
    special = f', "{special_key}": true' if token.special else ""
    return f'{{"id": {token.id}, "text": {quote(token.text)}, "{key}": {number}{special}}}'


_FORMATTERS = ("json", "jsonlines", "sse")
_TOP_LEVEL = {"inputs", "parameters", "stream"}
_ADAPTERS = "adapters"
_CACHED_PARAMETERS, _CACHED_KEY_BYTES = 1000, 500


def parameter_rules(settings: ModelSettings) -> ParameterRules:
    """How these settings make parameters read."""
    return ParameterRules(
        do_sample_inferred=settings.do_sample_inferred,
        details_by_default=settings.tgi_compat,
        typical_p=settings.rolling_batch in ("lmi-dist", "scheduler"),
        trtllm=settings.rolling_batch == "trtllm",
        max_sequences=settings.rolling_batch_size,
        strict=settings.strict_parameters,
        token_logprobs=settings.token_logprobs,
    )


class LmiContract:
    """Parses LMI bodies for one model."""

    def __init__(self, settings: ModelSettings, overload_status: int = 503) -> None:
        self._settings = settings
        self._overload_status = overload_status
        self._fields = _TOP_LEVEL | {_ADAPTERS} if settings.enable_lora else _TOP_LEVEL
        self._known: dict[bytes, LmiParameters] = {}
        self._rules = parameter_rules(settings)

    def parse(self, call: Call) -> Exchange:
        document = _document(call)
        prompts, in_array = _prompts(document.get("inputs"))
        values = document.get("parameters")
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise payload_refused(f"`parameters` must be an object, got {json_kind(values)}")
        stream = document.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise payload_refused(f"`stream` must be true or false, got {json_kind(stream)}")
        adapters = self._adapters(call, document.get(_ADAPTERS), len(prompts))
        try:
            parameters = self._parameters(values)
            return self._exchange(call, document, prompts, in_array, parameters, bool(stream), adapters)
        except InvalidParameter as error:
            failed = self._answer("", bool(stream), self._formatter(values.get("output_formatter"), bool(stream)))
            raise ContractError(failed.fail(error), error.message) from None

    def refusal(self, error: RequestError) -> Reply:
        return Reply(FAILED_DEPENDENCY, JSON, payload_error(error.message))

    def _adapters(self, call: Call, given: Any, prompts: int) -> tuple[str | None, ...]:
        """None where adapters are off: LMI does not even look then (contracts/lmi.md section 9.4)."""
        if not self._settings.enable_lora:
            return (None,) * prompts
        try:
            return adapters_of(call, given, prompts)
        except InvalidRequest as error:
            raise payload_refused(error.message) from None

    def _parameters(self, values: dict[str, Any]) -> LmiParameters:
        """Clients send the same parameters again and again; reading them costs more than finding them."""
        key = msgspec.json.encode(values)
        parameters = self._known.get(key)
        if parameters is None:
            parameters = read_parameters(values, self._rules)
            if len(key) <= _CACHED_KEY_BYTES:
                if len(self._known) >= _CACHED_PARAMETERS:
                    self._known.clear()
                self._known[key] = parameters
        return parameters

    def _exchange(
        self,
        call: Call,
        document: dict[str, Any],
        prompts: tuple[str, ...],
        in_array: bool,
        parameters: LmiParameters,
        stream: bool,
        adapters: tuple[str | None, ...],
    ) -> Exchange:
        formatter = self._formatter(parameters.output_formatter, stream)
        records = formatter != "json"
        if records and len(prompts) > 1:
            raise payload_refused("`inputs` must be a single string when the answer is streamed")
        if records and parameters.beam_search is not None:
            raise InvalidParameter("num_beams", "above 1 cannot be streamed: no token is final before the last")
        show = Show(
            details=parameters.details,
            full_text=parameters.return_full_text,
            prefill=parameters.decoder_input_details,
            top_tokens=parameters.top_n_tokens > 0,
            several=parameters.several and not records,
            tgi=self._settings.tgi_compat,
            overload_status=self._overload_status,
        )
        answer: Answer
        if records:
            answer = RecordAnswer(prompts[0], show, sse=formatter == "sse")
        else:
            answer = JsonAnswer(prompts, show, in_array)
        requests = tuple(
            _request(call, index if len(prompts) > 1 else None, prompt, parameters, show, records, adapter)
            for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
        )
        return Exchange(requests, answer, _notes(document, self._fields, parameters, formatter))

    def _formatter(self, asked: Any, stream: bool) -> str:
        if asked in _FORMATTERS:
            return str(asked)
        if self._settings.output_formatter is not None:
            return self._settings.output_formatter
        if not stream:
            return "json"
        return "sse" if self._settings.tgi_compat else "jsonlines"

    def _answer(self, prompt: str, stream: bool, formatter: str) -> Answer:
        show = Show(tgi=self._settings.tgi_compat)
        if stream or formatter != "json":
            return RecordAnswer(prompt, show, sse=formatter == "sse")
        return JsonAnswer((prompt,), show, in_array=False)


def _document(call: Call) -> dict[str, Any]:
    try:
        return decode_object(call.body, call.content_type)
    except BodyError as error:
        raise payload_refused(str(error)) from None


def _prompts(inputs: Any) -> tuple[tuple[str, ...], bool]:
    """The prompts, and whether the client sent them as an array and so gets an array back."""
    if isinstance(inputs, str):
        if not inputs:
            raise payload_refused("`inputs` must not be empty")
        return (inputs,), False
    if inputs is None:
        raise payload_refused("`inputs` is missing; expected a string or an array of strings")
    if not isinstance(inputs, list):
        raise payload_refused(f"`inputs` must be a string or an array of strings, got {json_kind(inputs)}")
    if not inputs or not all(isinstance(prompt, str) and prompt for prompt in inputs):
        raise payload_refused("`inputs` must hold strings, at least one and none empty")
    return tuple(inputs), True


def _request(
    call: Call,
    index: int | None,
    prompt: str,
    parameters: LmiParameters,
    show: Show,
    records: bool,
    adapter: str | None,
) -> GenerationRequest:
    want_tokens = records or show.details
    return GenerationRequest(
        request_id=call.request_id if index is None else f"{call.request_id}-{index}",
        prompt=prompt,
        sampling=parameters.sampling,
        stream=records,
        # A stream shows one sequence, so no more are generated for it.
        sequences=1 if records else parameters.sequences,
        candidates=1 if records else parameters.candidates,
        beam_search=parameters.beam_search,
        truncate_prompt_tokens=parameters.truncate,
        want_tokens=want_tokens,
        want_logprobs=want_tokens and parameters.token_logprobs,
        want_prompt_tokens=show.details and show.prefill,
        top_tokens=parameters.top_n_tokens if show.details else 0,
        adapter=adapter,
    )


def _notes(document: dict[str, Any], fields: set[str], parameters: LmiParameters, formatter: str) -> tuple[str, ...]:
    notes = []
    if parameters.ignored:
        notes.append(f"parameters without effect: {', '.join(parameters.ignored)}")
    if unknown := document.keys() - fields:
        notes.append(f"fields without effect: {', '.join(sorted(unknown))}")
    if parameters.output_formatter not in (None, formatter):
        notes.append(f"unknown output_formatter, {formatter} used instead")
    return tuple(notes)
