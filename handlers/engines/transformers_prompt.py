"""Log probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from handlers.engines.transformers_model import TransformersModel

_CHUNK = 256
"""Tokens in one pass: the logits of all tokens of a long prompt together would take gigabytes."""


@torch.no_grad()  # type: ignore[untyped-decorator]
def prompt_logprobs(model: TransformersModel, prompt_ids: Sequence[int]) -> list[float]:
    """The log probability of each token of the prompt but the first, given those before; one pass over the prompt."""
    values: list[float] = []
    cache: Any = None
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    for begin in range(0, len(prompt_ids) - 1, _CHUNK):
        end = min(begin + _CHUNK, len(prompt_ids) - 1)
        output = model.model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logprobs = output.logits[0].float().log_softmax(dim=-1)
        following = ids[0, begin + 1 : end + 1]
        values += logprobs.gather(-1, following[:, None]).squeeze(-1).tolist()
    return values
