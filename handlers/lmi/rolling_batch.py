"""LMI's rolling-batch contract: bodies with `inputs`, `parameters` and `stream`.

Source: LMI schema v0.31, "Rolling Batch/Continuous Batch Schema".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from engines.errors import InvalidParameter, InvalidRequest, RequestError, UnknownAdapter
from engines.request import GenerationRequest
from handlers.answers.token_answer import TokenDocument, TokenForm, TokenStream, without
from handlers.contract import Answer, Call, ContractError, Exchange, Reply
from handlers.djl_errors import unknown_adapter
from handlers.lmi.adapter_choice import adapters_of
from handlers.lmi.body import notes_of, read_body, request_ids, stream_of
from handlers.lmi.errors import failure, payload_refused, request_error, status_of, stream_error, tgi_error_type
from handlers.lmi.parameters import ParameterRules, read_parameters
from handlers.model_config import ModelConfig
from handlers.parsing.json_fields import json_kind
from handlers.parsing.parameter_memo import ParameterMemo

_FORM = TokenForm(token=('{"id": ', ', "text": ', ', "log_prob": '), ends=("}", ', "special_token": true}'))
# The form with option.tgi_compat.
_TGI_FORM = TokenForm(token=('{"id": ', ', "text": ', ', "logprob": '), ends=("}", ', "special": true}'))
# The members of `details`: `_DETAILS` in a document with one sequence, `_SEVERAL` in a document with several sequences,
# `_LAST` at the end of a stream. `_OTHER` has the members of each sequence after the first.
_COUNTS = ("finish_reason", "generated_tokens")
_DETAILS = (*_COUNTS, "inputs", "tokens", "prefill", "top_tokens")
_SEVERAL = ("inputs", *_COUNTS, "tokens", "prefill", "top_tokens", "best_of_sequences")
_LAST = (*_COUNTS, "inputs", "prefill", "top_tokens")
_OTHER = (*_COUNTS, "tokens", "prefill", "top_tokens", "generated_text")
_FORMATTERS = ("json", "jsonlines", "sse")
_FIELDS = frozenset({"inputs", "parameters", "stream"})


def parameter_rules(config: ModelConfig) -> ParameterRules:
    """Return the model's rules for reading parameters."""
    return ParameterRules(
        do_sample_inferred=config.do_sample_inferred,
        details_by_default=config.lmi.tgi_compat,
        typical_p=config.rolling_batch in ("lmi-dist", "scheduler"),
        trtllm=config.rolling_batch == "trtllm",
        max_sequences=config.rolling_batch_size,
        strict=config.strict_parameters,
        token_logprobs=config.lmi.token_logprobs,
    )


class _ParsedParameters(msgspec.Struct, frozen=True):
    """The results of parsing a request's parameters. These results do not depend on the prompts."""

    formatter: str
    form: TokenForm
    request: GenerationRequest  # The request without the id and the prompt.
    notes: tuple[str, ...]
    names: Mapping[str, str]  # See `Exchange`.


class LmiRollingContract:
    """Parses rolling-batch bodies for one model."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._fields = _FIELDS | {"adapters"} if config.enable_lora else _FIELDS
        self._rules = parameter_rules(config)
        self._memo = ParameterMemo[_ParsedParameters]()

    def parse(self, call: Call) -> Exchange:
        try:
            body = read_body(call, _prompts)
            stream = stream_of(body.document.get("stream"))
            adapters: tuple[str | None, ...] = (None,) * len(body.prompts)
            if self._config.enable_lora:  # Otherwise LMI ignores adapters.
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
            refusal = _failure(error, write, tgi=self._config.lmi.tgi_compat)
            raise ContractError(refusal, error.message) from None
        answer: Answer
        tgi = self._config.lmi.tgi_compat
        if records:
            answer = RecordAnswer(parsed.form, prompts[0], sse=parsed.formatter == "sse", tgi=tgi)
        else:
            in_array = tgi or isinstance(body.document["inputs"], list)
            answer = JsonAnswer(parsed.form, prompts, in_array=in_array, tgi=tgi)
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
        asked_for = {"prefill": parameters.decoder_input_details, "top_tokens": parameters.top_n_tokens > 0}
        left_out = [name for name, asked in asked_for.items() if not asked]
        names = _SEVERAL if several else _LAST if records else _DETAILS
        form = msgspec.structs.replace(
            _TGI_FORM if self._config.lmi.tgi_compat else _FORM,
            details=without(names, left_out) if parameters.details or several else (),
            others=without(_OTHER, left_out),
            full_text=parameters.return_full_text,
        )
        notes = notes_of({}, (), parameters.ignored)
        if parameters.output_formatter not in (None, formatter):
            notes += (f"unknown output_formatter, {formatter} used instead",)
        want_tokens = records or bool(form.details)
        request = msgspec.structs.replace(
            asked,
            stream=records,
            # A stream shows one sequence, so only one is generated.
            sequences=1 if records else asked.sequences,
            candidates=1 if records else asked.candidates,
            want_tokens=want_tokens,
            want_logprobs=want_tokens and parameters.token_logprobs,
            want_prompt_tokens="prefill" in form.details,
            top_tokens=parameters.top_n_tokens if form.details else 0,
        )
        return _ParsedParameters(formatter, form, request, notes, parameters.names)

    def _formatter(self, asked: Any, stream: bool) -> str:
        if asked in _FORMATTERS:
            return str(asked)
        if self._config.lmi.output_formatter is not None:
            return self._config.lmi.output_formatter
        if not stream:
            return "json"
        return "sse" if self._config.lmi.tgi_compat else "jsonlines"


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


class JsonAnswer(TokenDocument):
    """A JSON document, or an array with a document for each prompt if the client sent an array of prompts."""

    def __init__(self, form: TokenForm, prompts: Sequence[str], *, in_array: bool, tgi: bool) -> None:
        super().__init__(form, prompts)
        self._tgi = tgi
        if in_array:
            self.around = ("[{", "}, {", "}]")

    def fail(self, error: RequestError) -> Reply:
        return _failure(error, request_error, tgi=self._tgi)


class RecordAnswer(TokenStream):
    """A stream with a record for each token. Each record is a line or a server-sent event."""

    def __init__(self, form: TokenForm, prompt: str, *, sse: bool, tgi: bool) -> None:
        self.content_type = "text/event-stream" if sse else "application/jsonlines"
        self._before, self.after = ("data: ", "\n\n") if sse else ("", "\n")
        self.head, self._tgi = self._before + '{"token": ', tgi
        super().__init__(form, prompt)

    def fail(self, error: RequestError) -> Reply:
        """Return the error's record as a JSON document, because the stream has not begun."""
        return _failure(error, stream_error, tgi=self._tgi)

    def fail_midway(self, error: RequestError) -> bytes:
        return (self._before + _error(error, stream_error, tgi=self._tgi) + self.after).encode()


def _failure(error: RequestError, write: Callable[[str, int, str | None], str], *, tgi: bool) -> Reply:
    if isinstance(error, UnknownAdapter):
        return unknown_adapter(error)
    return failure(error, _error(error, write, tgi=tgi).encode())


def _error(error: RequestError, write: Callable[[str, int, str | None], str], *, tgi: bool) -> str:
    return write(error.message, status_of(error), tgi_error_type(error) if tgi else None)
