"""Checks the parameters of vLLM's serving classes: refuses parameters that would harm the engine or have no effect."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError

from engines.errors import InvalidParameter
from engines.vllm.sampling import TYPICAL_P, SamplingTranslator, check_bad_texts, check_bad_words
from handlers.parsing.json_fields import MAX_STRING_LENGTH, MAX_STRINGS, json_kind

# Arguments for vLLM's connectors to other servers. They are part of `extra_args`, so clients can send them with any
# type in `vllm_xargs`.
TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
_INT64 = 2**63
_MOST_REPEATED = 2048  # After each token, the scheduler compares at most this many tokens for each pattern length.
_MOST_ID = 512  # The maximum number of characters of an id. The engine's messages repeat the id for each token.
_MOST_PROMPT_LOGPROBS = 1 << 17  # All log probabilities are sent at once. Each blocks the event loop for 13 µs.
# Parameters that are sent to the engine process as 64-bit integers.
_WHOLE_NUMBERS = ("min_tokens", "max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")


def check_parameters(params: Any, limits: SamplingTranslator, tokenizer: Any) -> None:
    """Refuse sampling parameters (vLLM's `SamplingParams`) that would harm the engine or have no effect.

    Raises:
        InvalidParameter: A parameter is refused. The error names it.
    """
    if params.prompt_logprobs is not None and limits.prompt_logprobs_refusal:
        raise InvalidParameter("prompt_logprobs", f"cannot be given: {limits.prompt_logprobs_refusal}")
    limits.check_listed_tokens(params)
    if not all(map(math.isfinite, (params.logit_bias or {}).values())):
        raise InvalidParameter("logit_bias", "must hold finite numbers")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    if len(stop) > MAX_STRINGS or any(len(text) > MAX_STRING_LENGTH for text in stop):
        raise InvalidParameter("stop", f"may hold {MAX_STRINGS} strings of {MAX_STRING_LENGTH} characters at most")
    for name in _WHOLE_NUMBERS:
        value = getattr(params, name, None)
        if value is not None and not -_INT64 <= value < _INT64:
            raise InvalidParameter(name, "must be a 64-bit number")
    extra = params.extra_args or {}
    for name in TRANSFERS:
        if not isinstance(extra.get(name, {}), dict):
            raise InvalidParameter(name, f"must be an object, got {json_kind(extra[name])}")
    if (typical_p := extra.get(TYPICAL_P)) is not None:
        _check_typical_p(typical_p, limits.typical_refusal)
    if (repetition := getattr(params, "repetition_detection", None)) is not None:
        most = repetition.max_pattern_size * repetition.min_count
        if most > _MOST_REPEATED:
            raise InvalidParameter(
                "repetition_detection", f"may have {_MOST_REPEATED} as `max_pattern_size` times `min_count` at most"
            )
    if params.bad_words:
        check_bad_texts(params.bad_words)
        tokenized = copy.copy(params)
        tokenized.update_from_tokenizer(tokenizer)
        check_bad_words(tokenized)


def check_prompt_logprobs(params: Any, prompt_tokens: int) -> None:
    """Refuse prompt log probabilities that would block the event loop for seconds.

    Raises:
        InvalidParameter: The answer would have too many log probabilities.
    """
    if (most := params.prompt_logprobs) is None:
        return
    count = prompt_tokens * (1 + most) if most >= 0 else math.inf
    if count > _MOST_PROMPT_LOGPROBS:
        raise InvalidParameter(
            "prompt_logprobs",
            f"may give {_MOST_PROMPT_LOGPROBS} log probabilities at most; the prompt has {prompt_tokens} tokens, with "
            f"{'all' if most < 0 else 1 + most} for each",
        )


def check_id(request_id: str, options: Mapping[str, Any]) -> None:
    """Refuse ids that are too long.

    Raises:
        VLLMValidationError: An id is too long. The error names the field.
    """
    for name, value in (("request_id", request_id), ("session_id", options.get("session_id"))):
        if isinstance(value, str) and len(value) > _MOST_ID:
            raise VLLMValidationError(f"`{name}` may have {_MOST_ID} characters at most", parameter=name)


def _check_typical_p(value: Any, refusal: str) -> None:
    """Check `typical_p`, which is a member of `vllm_xargs`. vLLM does not check these members."""
    if refusal:
        raise InvalidParameter(TYPICAL_P, refusal)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and 0.0 < value <= 1.0):
        raise InvalidParameter(TYPICAL_P, "must be a number above 0 and at most 1")
