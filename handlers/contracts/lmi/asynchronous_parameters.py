"""Parameters of LMI's asynchronous handler: LMI's names where it translates them, vLLM's own for all others.

Source: contracts/lmi.md sections 3.5 and 3.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers.contracts.parameter_reader import ParameterReader
from handlers.contracts.vllm_parameters import VllmParameters, read_vllm_parameters
from handlers.errors import InvalidParameter

DEFAULT_MAX_NEW_TOKENS = 30

_RENAMED = {
    "max_new_tokens": "max_tokens",
    "truncate": "truncate_prompt_tokens",
    "ignore_eos_token": "ignore_eos",
}
_OWN = frozenset({"details", "decoder_input_details", "return_full_text", "do_sample", "stop_sequences"})
_PASSED_ON = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens"),
        *("skip_special_tokens", "spaces_between_special_tokens", "bad_words", "logit_bias", "allowed_token_ids"),
        *("truncate_prompt_tokens", "structured_outputs", "guided_decoding"),
    }
)
_DEFAULTS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
"""What a model's own generation config may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncParameters:
    """One request's parameters."""

    vllm: VllmParameters
    details: bool
    prompt_details: bool
    full_text: bool
    seed: int | None
    """As the client sent it, for the answer's details."""
    ignored: tuple[str, ...]


def read_async_parameters(
    values: Mapping[str, Any], model_defaults: Mapping[str, Any], *, strict: bool
) -> AsyncParameters:
    """Validate and translate; null is absent.

    `model_defaults`: vLLM's default sampling parameters for the model. `strict`: unknown names are refused.

    Raises:
        InvalidParameter: naming the parameter, its value and what is allowed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    own = ParameterReader({name: value for name, value in given.items() if name in _OWN})
    passed = {name: value for name, value in model_defaults.items() if name in _DEFAULTS and value is not None}
    passed["max_tokens"] = DEFAULT_MAX_NEW_TOKENS
    passed |= {name: value for name, value in given.items() if name in _PASSED_ON}
    passed |= {theirs: given[name] for name, theirs in _RENAMED.items() if name in given}
    if own.has("do_sample") and not own.boolean("do_sample", True):
        passed["temperature"] = 0.0
    if stop := own.strings("stop_sequences"):
        passed["stop"] = [*stop, *ParameterReader(passed).strings("stop")]
    ignored = sorted(given.keys() - _OWN - _PASSED_ON - _RENAMED.keys() - {"stream"})
    if ignored and strict:
        raise InvalidParameter(ignored[0], "is not a parameter that has an effect (option.strict_parameters is on)")
    parameters = _named_as_sent(passed, given)
    details = own.boolean("details", False)
    return AsyncParameters(
        vllm=parameters,
        details=details,
        prompt_details=details and own.boolean("decoder_input_details", False),
        full_text=own.boolean("return_full_text", False),
        seed=parameters.sampling.seed,
        ignored=tuple(ignored),
    )


def _named_as_sent(passed: Mapping[str, Any], given: Mapping[str, Any]) -> VllmParameters:
    try:
        return read_vllm_parameters(passed)
    except InvalidParameter as error:
        for name, theirs in _RENAMED.items():
            if theirs == error.parameter and name in given:
                raise InvalidParameter(name, error.message.removeprefix(f"`{theirs}` ")) from None
        raise
