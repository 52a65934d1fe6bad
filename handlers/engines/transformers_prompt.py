"""Log probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from handlers.engines.transformers_model import TransformersModel

_CHUNK_ON_CPU, _CHUNK_ON_GPU = 128, 512
"""Tokens in one pass: the logits of all tokens of a long prompt would take gigabytes."""


@dataclass(frozen=True, slots=True)
class PromptReading:
    """What the model says of a prompt's tokens, from the second on."""

    values: list[float] = field(default_factory=list)
    """The log probability of each, given those before."""
    ranks: list[int] = field(default_factory=list)
    """The place of each by probability, from 1; empty unless wanted."""


@torch.no_grad()  # type: ignore[untyped-decorator]
def read_prompt(model: TransformersModel, prompt_ids: Sequence[int], want_ranks: bool) -> PromptReading:
    """Pass over the prompt in chunks; blocks for as long as the model takes."""
    reading, cache = PromptReading(), None
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    chunk = _CHUNK_ON_CPU if model.device.type == "cpu" else _CHUNK_ON_GPU
    last = len(prompt_ids) - 1
    for begin in range(0, last, chunk):
        end = min(begin + chunk, last)
        output: Any = model.model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logprobs = output.logits[0].float().log_softmax(dim=-1)
        own = logprobs.gather(-1, ids[0, begin + 1 : end + 1, None])
        reading.values.extend(own.squeeze(-1).tolist())
        if want_ranks:
            reading.ranks.extend(((logprobs > own).sum(dim=-1) + 1).tolist())
    return reading
