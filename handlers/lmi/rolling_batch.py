"""LMI's rolling-batch contract: bodies with `inputs`, `parameters` and `stream`.

Source: LMI schema v0.31, "Rolling Batch/Continuous Batch Schema".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from json.encoder import encode_basestring as quote
from math import isfinite
from typing import Any

import msgspec

from engines.errors import InvalidParameter, InvalidRequest, RequestError, UnknownAdapter
from engines.model_settings import ModelSettings
from engines.request import FinishReason, GeneratedSequence, GenerationRequest, Token, TokenDelta
from handlers.contract import JSON, Answer, Call, ContractError, Exchange, Reply
from handlers.djl_errors import unknown_adapter
from handlers.json_fields import json_kind
from handlers.lmi.adapter_choice import adapters_of
from handlers.lmi.body import notes_of, read_body, request_ids, stream_of
from handlers.lmi.errors import failure, payload_refused, request_error, status_of, stream_error, tgi_error_type
from handlers.lmi.parameters import LmiParameters, ParameterRules, read_parameters
from handlers.parameter_memo import ParameterMemo

FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
_FORMATTERS = ("json", "jsonlines", "sse")
_FIELDS = frozenset({"inputs", "parameters", "stream"})
_NO_TOKEN = Token(-1, "")


def parameter_rules(settings: ModelSettings) -> ParameterRules:
    """Return the rules by which parameters are read under these settings."""
    return ParameterRules(
        do_sample_inferred=settings.do_sample_inferred,
        details_by_default=settings.tgi_compat,
        typical_p=settings.rolling_batch in ("lmi-dist", "scheduler"),
        trtllm=settings.rolling_batch == "trtllm",
        max_sequences=settings.rolling_batch_size,
        strict=settings.strict_parameters,
        token_logprobs=settings.token_logprobs,
    )


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of an answer, from the request's parameters and the model's settings."""

    details: bool = False
    full_text: bool = False
    prefill: bool = False
    top_tokens: bool = False
    several: bool = False  # The answer has several sequences. It always has details then.
    tgi: bool = False  # The fields have TGI's names (option.tgi_compat).


class _ParsedParameters(msgspec.Struct, frozen=True):
    """The results of parsing a request's parameters, which do not depend on its prompts."""

    formatter: str
    options: AnswerOptions
    request: GenerationRequest  # Without the id and the prompt.
    notes: tuple[str, ...]
    names: Mapping[str, str]  # See `Exchange`.


class LmiRollingContract:
    """Parses rolling-batch bodies for one model."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._fields = _FIELDS | {"adapters"} if settings.enable_lora else _FIELDS
        self._rules = parameter_rules(settings)
        self._memo = ParameterMemo[_ParsedParameters]()

    def parse(self, call: Call) -> Exchange:
        try:
            body = read_body(call, _prompts)
            stream = stream_of(body.document.get("stream"))
            adapters: tuple[str | None, ...] = (None,) * len(body.prompts)
            if self._settings.enable_lora:  # Otherwise LMI ignores them.
                adapters = adapters_of(call, body.document.get("adapters"), len(body.prompts))
        except InvalidRequest as error:
            raise payload_refused(error.message) from None
        prompts = body.prompts
        try:
            key = msgspec.json.encode((stream, body.parameters))
            parsed = self._memo.get(key) or self._memo.keep(key, self._parse_parameters(body.parameters, stream))
            records = parsed.request.stream
            if records and len(prompts) > 1:
                raise payload_refused("`inputs` must be a single string when the answer is streamed")
            if records and parsed.request.beam_search is not None:
                raise InvalidParameter("num_beams", "above 1 cannot be streamed: no token is final before the last")
        except InvalidParameter as error:
            formatter = self._formatter(body.parameters.get("output_formatter"), stream)
            write = request_error if formatter == "json" and not stream else stream_error
            refusal = _failure(error, AnswerOptions(tgi=self._settings.tgi_compat), write)
            raise ContractError(refusal, error.message) from None
        answer: Answer
        if records:
            answer = RecordAnswer(prompts[0], parsed.options, sse=parsed.formatter == "sse")
        else:
            answer = JsonAnswer(prompts, parsed.options, in_array=isinstance(body.document["inputs"], list))
        requests = [
            msgspec.structs.replace(
                parsed.request, request_id=request_id, prompt=prompt, adapter=adapter, **call.steering
            )
            for request_id, prompt, adapter in zip(request_ids(call, len(prompts)), prompts, adapters, strict=True)
        ]
        notes = parsed.notes
        if body.document.keys() - self._fields:
            notes += notes_of(body.document, self._fields, ())
        return Exchange(tuple(requests), answer, notes, names=parsed.names)

    def _parse_parameters(self, values: dict[str, Any], stream: bool) -> _ParsedParameters:
        parameters = read_parameters(values, self._rules)
        formatter = self._formatter(parameters.output_formatter, stream)
        records = formatter != "json"
        asked = parameters.request
        several = not records and (max(asked.sequences, asked.candidates) > 1 or asked.beam_search is not None)
        options = AnswerOptions(
            details=parameters.details or several,
            full_text=parameters.return_full_text,
            prefill=parameters.decoder_input_details,
            top_tokens=parameters.top_n_tokens > 0,
            several=several,
            tgi=self._settings.tgi_compat,
        )
        notes = notes_of({}, (), parameters.ignored)
        if parameters.output_formatter not in (None, formatter):
            notes += (f"unknown output_formatter, {formatter} used instead",)
        request = _request(parameters, options, records)
        return _ParsedParameters(formatter, options, request, notes, parameters.names)

    def _formatter(self, asked: Any, stream: bool) -> str:
        if asked in _FORMATTERS:
            return str(asked)
        if self._settings.output_formatter is not None:
            return self._settings.output_formatter
        if not stream:
            return "json"
        return "sse" if self._settings.tgi_compat else "jsonlines"


def _prompts(inputs: Any) -> tuple[str, ...]:
    if inputs is None:
        raise InvalidRequest("`inputs` is missing; expected a string or an array of strings")
    if isinstance(inputs, str):
        if not inputs:
            raise InvalidRequest("`inputs` must not be empty")
        return (inputs,)
    if not isinstance(inputs, list):
        raise InvalidRequest(f"`inputs` must be a string or an array of strings, got {json_kind(inputs)}")
    if not inputs or not all(isinstance(prompt, str) and prompt for prompt in inputs):
        raise InvalidRequest("`inputs` must hold strings, at least one and none empty")
    return tuple(inputs)


def _request(parameters: LmiParameters, options: AnswerOptions, records: bool) -> GenerationRequest:
    asked, want_tokens = parameters.request, records or options.details
    return msgspec.structs.replace(
        asked,
        stream=records,
        # A stream shows one sequence, so no more are generated for it.
        sequences=1 if records else asked.sequences,
        candidates=1 if records else asked.candidates,
        want_tokens=want_tokens,
        want_logprobs=want_tokens and parameters.token_logprobs,
        want_prompt_tokens=options.details and options.prefill,
        top_tokens=parameters.top_n_tokens if options.details else 0,
    )


class JsonAnswer(Answer):
    """A JSON document, or an array with a document for each prompt if the client sent an array of prompts."""

    content_type = JSON

    def __init__(self, prompts: Sequence[str], options: AnswerOptions, in_array: bool) -> None:
        self._prompts = prompts
        self._options = options
        self._in_array = in_array or options.tgi
        self._sequences: list[dict[int, GeneratedSequence]] = [{} for _ in prompts]
        self._open = len(prompts)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        self._sequences[prompt].setdefault(delta.sequence, GeneratedSequence()).add(delta)
        self._open -= delta.last
        if self._open:
            return b""
        documents = [self._document(*pair) for pair in zip(self._prompts, self._sequences, strict=True)]
        return (f"[{', '.join(documents)}]" if self._in_array else documents[0]).encode()

    def fail(self, error: RequestError) -> Reply:
        return _failure(error, self._options, request_error)

    def _document(self, prompt: str, sequences: dict[int, GeneratedSequence]) -> str:
        options, (best, *others) = self._options, [sequences[rank] for rank in sorted(sequences)]
        text = f'{{"generated_text": {_text(prompt, best, options)}'
        if not options.details:
            return text + "}"
        if not options.several:
            return f'{text}, "details": {{{_counts(best)}, "inputs": {quote(prompt)}, {_token_lists(best, options)}}}}}'
        details = f'"inputs": {quote(prompt)}, {_counts(best)}, {_token_lists(best, options)}'
        if others:
            rest = ", ".join(self._other(prompt, other) for other in others)
            details += f', "best_of_sequences": [{rest}]'
        return f'{text}, "details": {{{details}}}}}'

    def _other(self, prompt: str, sequence: GeneratedSequence) -> str:
        text = _text(prompt, sequence, self._options)
        return f'{{{_counts(sequence)}, {_token_lists(sequence, self._options)}, "generated_text": {text}}}'


class RecordAnswer(Answer):
    """A record for each token, as a line or as a server-sent event. The last record has the whole text."""

    def __init__(self, prompt: str, options: AnswerOptions, sse: bool) -> None:
        self.content_type = "text/event-stream" if sse else "application/jsonlines"
        self._prompt = prompt
        self._options = options
        self._before, self._after = ("data: ", "\n\n") if sse else ("", "\n")
        self._head, self._tail = self._before + '{"token": ', "}" + self._after
        self._sequence = GeneratedSequence()

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return a record for each token of the delta.

        This is the hot path: it is called for each token of each stream.
        """
        if delta.sequence:
            return b""
        sequence, tokens = self._sequence, delta.tokens
        sequence.text.append(delta.text)
        if self._options.top_tokens:
            sequence.tokens.extend(tokens)
        if delta.prompt_tokens is not None:
            sequence.prompt_tokens = delta.prompt_tokens
        if not delta.last:
            if len(tokens) == 1:
                return (self._head + _token(tokens[0], self._options) + self._tail).encode()
            return "".join([self._head + _token(token, self._options) + self._tail for token in tokens]).encode()
        sequence.finish_reason, sequence.count = delta.finish_reason, delta.token_count
        options = self._options
        *earlier, final = tokens or [_NO_TOKEN]
        records = [self._head + _token(token, options) + self._tail for token in earlier]
        return ("".join(records) + self._head + _token(final, options) + self._end()).encode()

    def fail(self, error: RequestError) -> Reply:
        """Return the error's record as a JSON document, because the stream has not begun."""
        return _failure(error, self._options, stream_error)

    def fail_midway(self, error: RequestError) -> bytes:
        return (self._before + _error(error, self._options, stream_error) + self._after).encode()

    def _end(self) -> str:
        sequence, options = self._sequence, self._options
        end = f', "generated_text": {_text(self._prompt, sequence, options)}'
        if options.details:
            details = f'{_counts(sequence)}, "inputs": {quote(self._prompt)}{_prompt_and_top(sequence, options)}'
            end += f', "details": {{{details}}}'
        return end + "}" + self._after


def _failure(error: RequestError, options: AnswerOptions, write: Callable[[str, int, str | None], str]) -> Reply:
    if isinstance(error, UnknownAdapter):
        return unknown_adapter(error)
    return failure(error, _error(error, options, write).encode())


def _error(error: RequestError, options: AnswerOptions, write: Callable[[str, int, str | None], str]) -> str:
    return write(error.message, status_of(error), tgi_error_type(error) if options.tgi else None)


def _text(prompt: str, sequence: GeneratedSequence, options: AnswerOptions) -> str:
    text = "".join(sequence.text)
    return quote(prompt + text if options.full_text else text)


def _counts(sequence: GeneratedSequence) -> str:
    reason = f'"{FINISH_REASONS[sequence.finish_reason]}"' if sequence.finish_reason else "null"
    return f'"finish_reason": {reason}, "generated_tokens": {sequence.count}'


def _token_lists(sequence: GeneratedSequence, options: AnswerOptions) -> str:
    return f'"tokens": {_tokens(sequence.tokens, options)}{_prompt_and_top(sequence, options)}'


def _prompt_and_top(sequence: GeneratedSequence, options: AnswerOptions) -> str:
    text = ""
    if options.prefill:
        text += f', "prefill": {_tokens(sequence.prompt_tokens, options)}'
    if options.top_tokens:
        lists = ", ".join(_tokens(token.top, options) for token in sequence.tokens)
        text += f', "top_tokens": [{lists}]'
    return text


def _tokens(tokens: Iterable[Token], options: AnswerOptions) -> str:
    return f"[{', '.join([_token(token, options) for token in tokens])}]"


def _token(token: Token, options: AnswerOptions) -> str:
    number = "null" if token.logprob is None or not isfinite(token.logprob) else repr(token.logprob)
    key, special_key = ("logprob", "special") if options.tgi else ("log_prob", "special_token")
    special = f', "{special_key}": true' if token.special else ""
    return f'{{"id": {token.id}, "text": {quote(token.text)}, "{key}": {number}{special}}}'
