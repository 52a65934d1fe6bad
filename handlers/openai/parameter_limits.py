"""What vLLM lets pass and its engine process would die of, or choke on, checked before it gets there."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

from handlers.contracts.parameter_reader import MAX_STRING_LENGTH, MAX_STRINGS
from handlers.engines.token_ids import check_token_ids
from handlers.engines.vllm_sampling import MAX_LISTED_TOKENS, MAX_STOP_TOKENS, NO_PROMPT_LOGPROBS, check_bad_words
from handlers.engines.vllm_typical import ARGUMENT as TYPICAL_P
from handlers.errors import InvalidParameter

_INT64 = 2**63
_LISTS = {
    "stop_token_ids": MAX_STOP_TOKENS,
    "allowed_token_ids": MAX_LISTED_TOKENS,
    "logit_bias": MAX_LISTED_TOKENS,
}
_MOST_NESTED = 32
"""Levels of `kv_transfer_params` and of `vllm_xargs`."""
_WHOLE_NUMBERS = ("min_tokens", "max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
"""What goes to the engine process as 64-bit numbers."""


def check_parameters(
    params: Any, vocabulary_size: int, tokenizer: Any, prompt_logprobs: bool = True, typical_refusal: str = ""
) -> None:
    """Refuse sampling parameters that would harm the engine or have no effect; `params`: vLLM's `SamplingParams`.

    `prompt_logprobs`: see `handlers.engines.vllm_adapters.has_prompt_logprobs`; `typical_refusal`: see `CheckingLLM`.

    Raises:
        InvalidParameter: the parameter is named.
    """
    if params.prompt_logprobs is not None and not prompt_logprobs:
        raise InvalidParameter("prompt_logprobs", f"cannot be given: {NO_PROMPT_LOGPROBS}")
    for name, limit in _LISTS.items():
        token_ids = getattr(params, name) or ()
        check_token_ids(name, token_ids, limit, vocabulary_size)
        if min(token_ids, default=0) < 0:
            raise InvalidParameter(name, "must hold no negative token ids")
    if not all(map(math.isfinite, (params.logit_bias or {}).values())):
        raise InvalidParameter("logit_bias", "must hold finite numbers")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    if len(stop) > MAX_STRINGS or any(len(text) > MAX_STRING_LENGTH for text in stop):
        raise InvalidParameter("stop", f"may hold {MAX_STRINGS} strings of {MAX_STRING_LENGTH} characters at most")
    for name in _WHOLE_NUMBERS:
        value = getattr(params, name, None)
        if value is not None and not -_INT64 <= value < _INT64:
            raise InvalidParameter(name, "must be a 64-bit number")
    for name, value in (params.extra_args or {}).items():
        _check_depth(name, value)
    _check_typical_p((params.extra_args or {}).get(TYPICAL_P), typical_refusal)
    if params.bad_words:
        tokenized = copy.copy(params)
        tokenized.update_from_tokenizer(tokenizer)
        check_bad_words(tokenized)


def _check_depth(name: str, value: Any) -> None:
    """The engine process pickles it, which ends the process where it is nested as deep as JSON may be."""
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return
    raise InvalidParameter(name, f"may be nested {_MOST_NESTED} levels deep at most")


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _check_typical_p(value: Any, refusal: str) -> None:
    """It comes in vLLM's `vllm_xargs`, which are passed on as they are."""
    if value is None:
        return
    if refusal:
        raise InvalidParameter(TYPICAL_P, refusal)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and 0.0 < value <= 1.0):
        raise InvalidParameter(TYPICAL_P, "must be a number above 0 and at most 1")
