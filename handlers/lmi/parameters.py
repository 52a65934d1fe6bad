"""Reads LMI's generation parameters: checks their types and ranges, adds defaults, and translates them for an engine.

Source: LMI schema v0.31, "GenerationParameters", with the tables for LMI Dist, vLLM and TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engines.errors import InvalidParameter
from engines.request import MAX_LENGTH_PENALTY, BeamSearch, EngineMemo, GenerationRequest, SamplingParameters
from handlers.parsing.constraints import FORMS, read_constraint, refuse_unread
from handlers.parsing.json_fields import ParameterReader, Reader

DEFAULT_MAX_NEW_TOKENS = 30
NOT_READ = (
    f"constrains the text by a name that is not read here; expected {', '.join(FORMS)}, stop, stop_sequences, "
    "stop_token_ids, bad_words, logit_bias, allowed_token_ids or min_new_tokens"
)

_SAMPLING_DEFAULTS = (1.0, 0, 1.0)  # The defaults of temperature, top_k and top_p.
_TRTLLM_SAMPLING_DEFAULTS = (1.0, 5, 0.85)  # The defaults in TensorRT-LLM's table.
_OTHER_NAMES = {"ignore_eos_token": "ignore_eos", "bad_sequences": "bad_words"}
_SAMPLING_SWITCHES = ("temperature", "top_p", "top_k", "min_p")


class LmiParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The validated and translated parameters of a request."""

    request: GenerationRequest  # The request without its id, its prompt and the settings of the answer.
    details: bool
    return_full_text: bool
    decoder_input_details: bool
    top_n_tokens: int
    token_logprobs: bool
    output_formatter: str | None
    # Parameters without effect: unknown parameters, and parameters that the engine lacks in this mode.
    ignored: tuple[str, ...]
    names: Mapping[str, str] = {}  # See `Exchange`.


class ParameterRules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a model that decide how parameters are read."""

    do_sample_inferred: bool = True
    details_by_default: bool = False
    # Whether locally typical sampling is available, as in lmi-dist. If not, the parameter has no effect, as in LMI with
    # vLLM.
    typical_p: bool = False
    trtllm: bool = False  # Whether to use the names and defaults of TensorRT-LLM.
    max_sequences: int = 256
    strict: bool = False
    token_logprobs: bool = True


def read_parameters(
    values: Mapping[str, Any], rules: ParameterRules, reader: Reader = ParameterReader
) -> LmiParameters:
    """Validate and translate the parameters of a request.

    Args:
        values: The parameters.
        rules: The rules of the model.
        reader: Creates the reader of the parameters. `handlers.openapi_schemas.parameters` passes another one, to get a
            schema of each parameter.

    Raises:
        InvalidParameter: A parameter is wrong. The message has the parameter, its value and the allowed values.
    """
    # In LMI's table for TensorRT-LLM, `stop` is a boolean without a meaning. Elsewhere it is a list of strings.
    stop_ignored = rules.trtllm and isinstance(values.get("stop"), bool)
    read = reader({**values, "stop": None} if stop_ignored else values)
    sequences, candidates = _sequences(read, rules)
    beam_search = _beam_search(read, rules)
    sampling = _sampling(read, rules)
    if beam_search is None and candidates > 1 and sampling.greedy:
        name = "best_of" if read.has("best_of") else "n"
        raise InvalidParameter(
            name,
            f"above 1 needs sampling, since greedy decoding gives one sequence: set `do_sample` (got {candidates})",
        )
    read.integer("logprobs", 0, minimum=0)
    read.integer("prompt_logprobs", 0, minimum=0)
    parameters = LmiParameters(
        details=read.boolean("details", rules.details_by_default),
        return_full_text=read.boolean("return_full_text", False),
        decoder_input_details=read.boolean("decoder_input_details", False),
        request=GenerationRequest(
            sampling=sampling,
            sequences=sequences,
            candidates=candidates,
            beam_search=beam_search,
            truncate_prompt_tokens=read.optional_integer("truncate", minimum=1),
            memo=EngineMemo(),
        ),
        top_n_tokens=read.integer("top_n_tokens", 0, minimum=0),
        token_logprobs=read.boolean("token_logprobs", rules.token_logprobs),
        output_formatter=read.optional_string("output_formatter"),
        ignored=(),
        names={name: other for other, name in _OTHER_NAMES.items() if read.has(other) and not read.has(name)},
    )
    refuse_unread(values, read.unread(), NOT_READ)
    ignored = _ignored(read, rules)
    return msgspec.structs.replace(parameters, ignored=(*ignored, "stop") if stop_ignored else ignored)


def _sequences(read: ParameterReader, rules: ParameterRules) -> tuple[int, int]:
    n = read.integer("n", 1, minimum=1, maximum=rules.max_sequences)
    best_of = read.integer("best_of", 1, minimum=1, maximum=rules.max_sequences)
    if best_of == 1:  # 1 is the default. Some clients also send this default if `n` is larger.
        return n, n
    if not read.has("n"):
        return best_of, best_of
    if best_of < n:
        raise InvalidParameter("best_of", f"must be at least `n` ({n}), got {best_of}")
    return n, best_of


def _beam_search(read: ParameterReader, rules: ParameterRules) -> BeamSearch | None:
    width = read.integer("num_beams", 1, minimum=1, maximum=rules.max_sequences)
    length_penalty = read.number("length_penalty", 1.0, minimum=-MAX_LENGTH_PENALTY, maximum=MAX_LENGTH_PENALTY)
    early_stopping = read.boolean("early_stopping", False)
    if width == 1:
        return None
    return BeamSearch(width=width, length_penalty=length_penalty, early_stopping=early_stopping)


def _sampling(read: ParameterReader, rules: ParameterRules) -> SamplingParameters:
    defaults = _TRTLLM_SAMPLING_DEFAULTS if rules.trtllm else _SAMPLING_DEFAULTS
    temperature = read.number("temperature", defaults[0], minimum=0.0)
    top_k = read.integer("top_k", defaults[1], minimum=-1)
    lowest_top_p = {"minimum": 0.0} if rules.trtllm else {"above": 0.0}
    top_p = read.number("top_p", defaults[2], maximum=1.0, **lowest_top_p)
    min_p = read.number("min_p", 0.0, minimum=0.0, maximum=1.0)
    typical_p = read.number("typical_p", 1.0, above=0.0, maximum=1.0)
    max_tokens = read.integer("max_tokens", DEFAULT_MAX_NEW_TOKENS, minimum=1)
    max_tokens = read.integer("max_new_tokens", max_tokens, minimum=1)
    min_tokens = _min_tokens(read, rules, max_tokens)
    stop = read.strings("stop_sequences") + read.strings("stop")
    samples = _samples(read, rules)
    if rules.trtllm:
        # TensorRT-LLM has no do_sample. It decodes greedily if both top_k and top_p are 0. If only top_p is 0, top_p
        # has no effect.
        samples = samples and (top_k > 0 or top_p > 0.0)
        top_k, top_p = (top_k, top_p or 1.0) if samples else (0, 1.0)
    return SamplingParameters(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if samples else 0.0,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p if rules.typical_p else 1.0,
        repetition_penalty=read.number("repetition_penalty", 1.0, above=0.0),
        presence_penalty=read.number("presence_penalty", 0.0, minimum=-2.0, maximum=2.0),
        frequency_penalty=read.number("frequency_penalty", 0.0, minimum=-2.0, maximum=2.0),
        seed=None if (seed := read.optional_integer("seed", digits=True)) == -1 else seed,
        stop=stop,
        stop_token_ids=read.integers("stop_token_ids", minimum=0),
        include_stop_str_in_output=read.boolean("include_stop_str_in_output", False),
        ignore_eos=read.boolean("ignore_eos_token", read.boolean("ignore_eos", False)),
        skip_special_tokens=read.boolean("skip_special_tokens", True),
        spaces_between_special_tokens=read.boolean("spaces_between_special_tokens", True),
        bad_words=read.strings("bad_words") + (read.strings("bad_sequences") if rules.trtllm else ()),
        logit_bias=read.logit_bias("logit_bias"),
        allowed_token_ids=read.integers("allowed_token_ids", minimum=0) or None,
        constraint=read_constraint(read),
    )


def _min_tokens(read: ParameterReader, rules: ParameterRules, max_tokens: int) -> int:
    newer, older = read.integer("min_new_tokens", 0, minimum=0), read.integer("min_tokens", 0, minimum=0)
    name, min_tokens = ("min_new_tokens", newer) if read.has("min_new_tokens") else ("min_tokens", older)
    if rules.trtllm and read.has("min_length"):
        name = "min_length"
        min_tokens = read.integer(name, 1, minimum=0)
    if min_tokens > max_tokens:
        raise InvalidParameter(name, f"must not be above the limit on new tokens ({max_tokens}), got {min_tokens}")
    return min_tokens


def _samples(read: ParameterReader, rules: ParameterRules) -> bool:
    asked = read.boolean("do_sample", False)
    if read.has("do_sample") or not rules.do_sample_inferred:
        return asked
    return any(read.has(name) for name in _SAMPLING_SWITCHES) or (rules.typical_p and read.has("typical_p"))


def _ignored(read: ParameterReader, rules: ParameterRules) -> tuple[str, ...]:
    unknown = read.unread() - {"stream", "cached_prompt"}
    if unknown and rules.strict:
        name = min(unknown)
        raise InvalidParameter(name, "is not a parameter that this server knows (option.strict_parameters is on)")
    ignored = sorted(unknown)
    if read.has("typical_p") and not rules.typical_p:
        ignored.append("typical_p")
    return tuple(ignored)
