"""LMI's dynamic-batch contract (option.rolling_batch=disable): bodies with `inputs` and `parameters`.

Source: LMI schema v0.31, "Dynamic Batch/Static Batch Schema".
"""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec

from engines.errors import InvalidParameter, InvalidRequest, RequestError
from engines.request import FinishReason, TokenDelta
from handlers.answers.token_answer import TokenDocument, TokenForm
from handlers.contract import Answer, Call, ContractError, Exchange, Reply
from handlers.djl_errors import handler_failure
from handlers.lmi.body import notes_of, read_body, request_ids
from handlers.lmi.errors import failure, status_of
from handlers.lmi.parameters import DEFAULT_MAX_NEW_TOKENS, LmiParameters, ParameterRules, read_parameters
from handlers.model_config import ModelConfig
from handlers.parsing.json_fields import json_kind
from handlers.parsing.parameter_memo import ParameterMemo

STREAMED_MAX_NEW_TOKENS = 50  # LMI's default limit on the new tokens of a streamed answer.

_FIELDS = frozenset({"inputs", "parameters"})
# Parameters of the rolling batch that have no effect on this contract's answers.
_WITHOUT_EFFECT = ("details", "decoder_input_details", "output_formatter", "top_n_tokens")


def default_max_new_tokens(config: ModelConfig) -> int:
    """Return the default limit on the number of a request's new tokens."""
    return DEFAULT_MAX_NEW_TOKENS if config.enable_streaming == "false" else STREAMED_MAX_NEW_TOKENS


def parameter_rules(config: ModelConfig) -> ParameterRules:
    """Return the model's rules for reading parameters."""
    return ParameterRules(
        do_sample_inferred=config.do_sample_inferred,
        typical_p=True,
        max_sequences=config.rolling_batch_size,
        strict=config.strict_parameters,
        token_logprobs=False,
    )


class LmiDynamicContract:
    """Parses dynamic-batch bodies for one model."""

    def __init__(self, config: ModelConfig, pad_text: str = "") -> None:
        """Create the contract.

        Args:
            config: The model's settings.
            pad_text: The text of the model's pad token. Streamed records show this text for finished prompts.
        """
        self._pad_text = pad_text
        self._streaming = config.enable_streaming
        self._stop_sequences = config.lmi.stop_sequences
        self._max_new_tokens = default_max_new_tokens(config)
        self._rules = parameter_rules(config)
        self._memo = ParameterMemo[LmiParameters]()

    def parse(self, call: Call) -> Exchange:
        try:
            body = read_body(call, _prompts)
            key = msgspec.json.encode(body.parameters)
            parsed = self._memo.get(key) or self._memo.keep(key, self._parsed(body.parameters))
        except RequestError as error:
            raise ContractError(_failure(error), error.message) from None
        prompts = body.prompts
        requests = tuple(
            [
                msgspec.structs.replace(parsed.request, request_id=request_id, prompt=prompt, **call.steering)
                for request_id, prompt in zip(request_ids(call, len(prompts)), prompts, strict=True)
            ]
        )
        notes = notes_of(body.document, _FIELDS, parsed.ignored)
        answer: Answer
        if self._streaming == "false":
            answer = ListAnswer(TokenForm(colon=":", full_text=parsed.return_full_text), prompts)
        else:
            # With the value "huggingface", a stream begins with the prompt, as in the transformers library.
            with_prompt = self._streaming == "huggingface" and parsed.return_full_text
            answer = RecordListAnswer(len(prompts), self._pad_text, prompts if with_prompt else ())
        return Exchange(requests, answer, notes, names=parsed.names)

    def _parsed(self, given: dict[str, Any]) -> LmiParameters:
        """Return the parameters of a request, adapted to the answers of this contract."""
        values = {name: value for name, value in given.items() if value is not None}
        names: dict[str, str] = {}  # The client's name of a parameter that has another name in the rolling batch.
        if (seed := values.pop("manual_seed", None)) is not None and "seed" not in values:
            values["seed"], names["seed"] = seed, "manual_seed"
        if "max_tokens" not in values:
            values.setdefault("max_new_tokens", self._max_new_tokens)
        try:
            parameters = read_parameters(values, self._rules)
        except InvalidParameter as error:
            raise error.renamed(names) from None
        asked, stream = parameters.request, self._streaming != "false"
        if stream and asked.beam_search is not None:
            raise InvalidParameter("num_beams", "above 1 cannot be streamed: no token is final before the last")
        # The answer has one text for each prompt: the text of its most probable sequence.
        request = msgspec.structs.replace(
            asked,
            sampling=msgspec.structs.replace(asked.sampling, stop=(*asked.sampling.stop, *self._stop_sequences)),
            stream=stream,
            sequences=1,
            candidates=1 if stream else asked.candidates,
        )
        return msgspec.structs.replace(
            parameters,
            request=request,
            return_full_text=values.get("return_full_text") is not False,
            ignored=(*parameters.ignored, *(name for name in _WITHOUT_EFFECT if name in values)),
            names={**parameters.names, **names},
        )


def _prompts(inputs: Any) -> tuple[str, ...]:
    if inputs is None:
        raise InvalidRequest("`inputs` is missing; expected a string or an array of strings")
    prompts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(prompts, list):
        raise InvalidRequest(f"`inputs` must be a string or an array of strings, got {json_kind(inputs)}")
    if not prompts:
        raise InvalidRequest("`inputs` must hold at least one string")
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise InvalidRequest(f"`inputs` must hold strings only, got {json_kind(prompt)}")
        if not prompt:
            raise InvalidRequest("`inputs` must not be empty")
    return tuple(prompts)


class ListAnswer(TokenDocument):
    """A JSON array with a text for each prompt, in order. It is sent when all prompts have finished."""

    around = ("[\n  {\n    ", "\n  },\n  {\n    ", "\n  }\n]")

    def fail(self, error: RequestError) -> Reply:
        return _failure(error)


class RecordListAnswer(Answer):
    """A record for each step, with an entry for each prompt.

    A record is sent when every unfinished prompt has an entry. If a prompt gets a second entry before the record is
    complete, the incomplete record is sent. The missing entries are then empty. A prompt has no entry if the engine's
    step did not include the prompt or added no text that can be sent: a character is incomplete, a special token is not
    shown, or the text may be the beginning of a stop string.
    """

    content_type = "application/jsonlines"

    def __init__(self, prompts: int, pad_text: str, first_record: Sequence[str] = ()) -> None:
        """Create the answer.

        Args:
            prompts: The number of prompts.
            pad_text: The entry of a finished prompt.
            first_record: The entries of a record in front of all generated text. If empty, no such record is sent.
        """
        self._entries: list[str | None] = [None] * prompts
        self._finished = [False] * prompts
        self._missing = prompts
        self._pad_text = pad_text
        self._head = _record(first_record) if first_record else ""
        self._sent = bool(first_record)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        records, self._head = self._head, ""
        if self._entries[prompt] is not None:
            records += self._flush()
        shown_as_pad = not delta.text and delta.finish_reason is FinishReason.EOS
        self._entries[prompt] = self._pad_text if shown_as_pad else delta.text
        self._finished[prompt] = delta.last
        self._missing -= 1
        if self._missing == 0:
            records += self._flush()
        return records.encode()

    def fail(self, error: RequestError) -> Reply:
        return _failure(error)

    def fail_midway(self, error: RequestError) -> bytes:
        """Return the pending record, and a record with the error instead of `outputs`."""
        pending = self._flush() if any(self._entries) else ""
        reason = encode_basestring_ascii(error.message)
        record = f'{{"code": {status_of(error)}, "message": "invoke handler failure", "error": {reason}}}\n'
        return f"{pending}{record}".encode()

    def _flush(self) -> str:
        entries = [
            entry if entry is not None else self._pad_text if finished else ""
            for entry, finished in zip(self._entries, self._finished, strict=True)
        ]
        at_end = all(self._finished) and not any(entry for entry in entries if entry != self._pad_text)
        self._entries = [None] * len(entries)
        self._missing = self._finished.count(False)
        if at_end and self._sent:  # The entries have no text, so the client needs no record.
            return ""
        self._sent = True
        return _record(entries)


def _record(entries: Sequence[str]) -> str:
    return f'{{"outputs": [{", ".join(map(encode_basestring_ascii, entries))}]}}\n'


def _failure(error: RequestError) -> Reply:
    return failure(error, handler_failure(error.message, status_of(error)))
