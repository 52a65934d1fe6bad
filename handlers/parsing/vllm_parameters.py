"""Reads vLLM's sampling parameters under vLLM's own names: their types, ranges and defaults.

happy_vllm and Triton's vLLM backend pass all parameters of a client to vLLM's `SamplingParams`. So the names are the
names in `SamplingParams`. Clients also send names of earlier releases: `best_of`, `use_beam_search` and
`guided_decoding`. Source: vLLM, `sampling_params.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from engines.errors import SHOWN, InvalidParameter
from engines.request import (
    MAX_LENGTH_PENALTY,
    BeamSearch,
    Constraint,
    EngineMemo,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
)
from handlers.parsing.constraints import decoded, read_constraint
from handlers.parsing.json_fields import Kind, ParameterReader, Reader

DEFAULT_MAX_TOKENS = 16
MAX_SEQUENCES = 16384  # vLLM's own limit on `n` (VLLM_MAX_N_SEQUENCES).
GREEDY_BELOW = 1e-5  # vLLM's epsilon. A lower temperature means greedy decoding.
# vLLM's names for the reasons why a sequence ended.
FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
_NOT_FOR_CLIENTS = {
    "logits_processors": "is not allowed: a request cannot bring code into the engine",
    **dict.fromkeys(
        (
            *("_all_stop_token_ids", "_bad_words_token_ids", "_eos_token_id", "bad_words_token_ids", "extra_args"),
            *("flat_logprobs", "logprob_token_ids", "output_kind", "output_text_buffer_length", "prompt_logprob_start"),
            *("prompt_logprob_token_ids", "repetition_detection", "routed_experts_prompt_start", "skip_clone"),
            *("skip_reading_prefix_cache", "stream_interval", "thinking_token_budget", "trace_decode_token_ids"),
            *("watermarking",),
        ),
        "is a parameter of vLLM that a request cannot set on this server",
    ),
}
_TEXT_NUMBER = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?").fullmatch
_TEXT_INTEGER = re.compile(r"[+-]?[0-9]{1,40}").fullmatch
TEXT_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmParameters:
    """One request's sampling parameters, validated and translated."""

    # The request without its id and prompt. A beam search generates `beam_search.width` sequences. `sequences` is the
    # number of the best ones that the answer contains.
    request: GenerationRequest
    # The number of alternatives for each token. 0 means only the token's own log probability. None means no log
    # probabilities.
    logprobs: int | None
    prompt_logprobs: int | None  # The number of alternatives for each token of the prompt.
    detokenize: bool  # If False, the answer's text is empty.

    def constrained(self, constraint: Constraint) -> VllmParameters:
        sampling = msgspec.structs.replace(self.request.sampling, constraint=constraint)
        return replace(self, request=msgspec.structs.replace(self.request, sampling=sampling))


def vllm_names(values: Mapping[str, Any]) -> dict[str, str]:
    """Return vLLM's names of the parameters that have another name in the engine, keyed by the engine's name."""
    return {"top_n_tokens": "logprobs", "num_beams": "best_of" if values.get("best_of") is not None else "n"}


class TextReader(ParameterReader):
    """Also accepts numbers, booleans and documents as text, such as "16", "0.5", "true" or "[1, 2]".

    Triton's clients send such text. Text that cannot be converted is refused, and the error names the parameter.
    """

    booleans: ClassVar[Mapping[str, bool]] = TEXT_BOOLEANS
    # The types, in addition to booleans, whose values may be given as text.
    kinds: ClassVar[tuple[Kind, ...]] = ("integer", "number", "array", "object")

    def _meant(self, kind: Kind, value: Any) -> Any:
        if kind == "boolean":
            if isinstance(value, str):
                return self.booleans.get(value.strip().lower(), value)
            # Triton's vLLM backend and Pydantic accept 0 and 1 as booleans.
            return bool(value) if isinstance(value, int | float) and value in (0, 1) else value
        if not isinstance(value, str) or kind not in self.kinds:
            return value
        return number_of_text(value) if kind in ("integer", "number") else decoded(value)


def number_of_text(text: str) -> int | float | str:
    """Return the number that a text stands for, or the text itself if it is not a number."""
    stripped = text.strip()
    if _TEXT_INTEGER(stripped):
        return int(stripped)
    return float(stripped) if _TEXT_NUMBER(stripped) else text


def read_vllm_parameters(values: Mapping[str, Any], reader: Reader = ParameterReader) -> VllmParameters:
    """Validate and translate vLLM's keywords. Null counts as absent.

    Args:
        values: The parameters, by name.
        reader: Creates the reader of the parameters. `handlers.openapi_schemas.parameters` passes another one, to get a
            schema of each parameter.

    Raises:
        InvalidParameter: A parameter is wrong or unknown. The error names the parameter. The message of a wrong
            parameter also has its value and the allowed values.
    """
    read = reader(values)
    sampling = _sampling(read)
    sequences, candidates = _sequences(read)
    beam_search = _beam_search(read, candidates)
    if beam_search is None and candidates > 1 and sampling.greedy:
        raise InvalidParameter(
            "best_of" if candidates > sequences else "n",
            f"above 1 needs sampling: with `temperature` 0 there is one sequence only (got {candidates})",
        )
    request = GenerationRequest(
        sampling=sampling,
        sequences=sequences,
        candidates=sequences if beam_search is not None else candidates,
        beam_search=beam_search,
        truncate_prompt_tokens=read.optional_integer("truncate_prompt_tokens", minimum=1),
        memo=EngineMemo(),
    )
    parameters = VllmParameters(
        request=request,
        logprobs=read.optional_integer("logprobs", minimum=0),
        prompt_logprobs=read.optional_integer("prompt_logprobs", minimum=0),
        detokenize=read.boolean("detokenize", True),
    )
    if sampling.stop and not parameters.detokenize:
        raise InvalidParameter("stop", "needs the text of the answer: it cannot be combined with `detokenize` false")
    if unknown := read.unread():
        name = min(unknown)
        refusal = _NOT_FOR_CLIENTS.get(name, "is not a sampling parameter that vLLM has")
        raise InvalidParameter(name[:SHOWN], refusal)
    return parameters


def _sampling(read: ParameterReader) -> SamplingParameters:
    temperature = read.number("temperature", 1.0, minimum=0.0, maximum=2.0)
    max_tokens = read.integer("max_tokens", DEFAULT_MAX_TOKENS, minimum=1)
    allowed_token_ids = read.integers("allowed_token_ids", minimum=0)
    if read.has("allowed_token_ids") and not allowed_token_ids:
        raise InvalidParameter("allowed_token_ids", "must not be empty")
    if (min_tokens := read.integer("min_tokens", 0, minimum=0)) > max_tokens:
        raise InvalidParameter("min_tokens", f"must not be above `max_tokens` ({max_tokens}), got {min_tokens}")
    return SamplingParameters(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(read.integer("top_k", 0, minimum=-1), 0),
        top_p=read.number("top_p", 1.0, above=0.0, maximum=1.0),
        min_p=read.number("min_p", 0.0, minimum=0.0, maximum=1.0),
        repetition_penalty=read.number("repetition_penalty", 1.0, above=0.0),
        presence_penalty=read.number("presence_penalty", 0.0, minimum=-2.0, maximum=2.0),
        frequency_penalty=read.number("frequency_penalty", 0.0, minimum=-2.0, maximum=2.0),
        seed=None if (seed := read.optional_integer("seed")) == -1 else seed,  # -1 means no seed, as in vLLM
        stop=read.strings("stop"),
        stop_token_ids=tuple(dict.fromkeys(read.integers("stop_token_ids", minimum=0))),
        include_stop_str_in_output=read.boolean("include_stop_str_in_output", False),
        ignore_eos=read.boolean("ignore_eos", False),
        skip_special_tokens=read.boolean("skip_special_tokens", True),
        spaces_between_special_tokens=read.boolean("spaces_between_special_tokens", True),
        bad_words=tuple(dict.fromkeys(read.strings("bad_words"))),
        logit_bias=read.logit_bias("logit_bias"),
        allowed_token_ids=allowed_token_ids or None,
        constraint=read_constraint(read),
    )


def _sequences(read: ParameterReader) -> tuple[int, int]:
    """Return the number of sequences in the answer, and the number of generated sequences."""
    n = read.integer("n", 1, minimum=1, maximum=MAX_SEQUENCES)
    best_of = read.integer("best_of", n, minimum=1, maximum=MAX_SEQUENCES)
    if best_of < n:
        raise InvalidParameter("best_of", f"must be at least `n` ({n}), got {best_of}")
    return n, best_of


def _beam_search(read: ParameterReader, width: int) -> BeamSearch | None:
    """Return the beam search, if any. As in vLLM, it replaces sampling, so sampling parameters have no effect."""
    asked = read.boolean("use_beam_search", False)
    length_penalty = read.number("length_penalty", 1.0, minimum=-MAX_LENGTH_PENALTY, maximum=MAX_LENGTH_PENALTY)
    early_stopping = read.boolean("early_stopping", False)
    if asked and width == 1:
        raise InvalidParameter("use_beam_search", "needs a width above 1: set `n` or `best_of`")
    if asked:
        return BeamSearch(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    if length_penalty != 1.0:
        raise InvalidParameter("length_penalty", "has an effect only with `use_beam_search` true")
    if early_stopping:
        raise InvalidParameter("early_stopping", "has an effect only with `use_beam_search` true")
    return None
