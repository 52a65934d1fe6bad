"""LMI's rolling-batch contract: `/invocations` and `/predictions/<model>` with `inputs`, `parameters` and `stream`.

Source: LMI schema v0.31, Rolling Batch/Continuous Batch Schema; contracts/lmi.md sections 3 and 4.
"""

from __future__ import annotations

from typing import Any

import msgspec

from handlers.contracts.json_kinds import json_kind
from handlers.contracts.lmi.adapter_choice import adapters_of
from handlers.contracts.lmi.body import BodyError, decode_object
from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, payload_error, payload_refused
from handlers.contracts.lmi.parameters import LmiParameters, ParameterRules, read_parameters
from handlers.contracts.lmi.rolling_batch_answer import JsonAnswer, RecordAnswer, Show
from handlers.contracts.protocol import Answer, Call, ContractError, Exchange, Reply
from handlers.errors import InvalidParameter, InvalidRequest, RequestError
from handlers.model_settings import ModelSettings
from handlers.request import GenerationRequest

_FORMATTERS = ("json", "jsonlines", "sse")
_TOP_LEVEL = {"inputs", "parameters", "stream"}
_ADAPTERS = "adapters"
_CACHED_PARAMETERS, _CACHED_KEY_BYTES = 1000, 500


class LmiContract:
    """Parses LMI bodies for one model."""

    def __init__(self, settings: ModelSettings, overload_status: int = 503) -> None:
        self._settings = settings
        self._overload_status = overload_status
        self._fields = _TOP_LEVEL | {_ADAPTERS} if settings.enable_lora else _TOP_LEVEL
        self._known: dict[bytes, LmiParameters] = {}
        self._rules = ParameterRules(
            do_sample_inferred=settings.do_sample_inferred,
            details_by_default=settings.tgi_compat,
            typical_p=settings.rolling_batch in ("lmi-dist", "scheduler"),
            trtllm=settings.rolling_batch == "trtllm",
            max_sequences=settings.rolling_batch_size,
            strict=settings.strict_parameters,
            token_logprobs=settings.token_logprobs,
        )

    def parse(self, call: Call) -> Exchange:
        """See `Contract.parse`."""
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
        """See `Contract.refusal`."""
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
