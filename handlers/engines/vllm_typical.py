"""Locally typical sampling for vLLM, which has none: lmi-dist's `typical_p`.

Runs inside vLLM's engine process, as a logits processor of its documented interface, and only where the model is served
as lmi-dist: on a GPU it keeps vLLM from using its newest model runner.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

ARGUMENT = "typical_p"


class TypicalLogitsProcessor(LogitsProcessor):
    """Keeps the tokens whose information content is nearest to the distribution's entropy, up to a mass of `typical_p`.

    Meister et al., "Locally Typical Sampling" (2022); the same cut as transformers' `TypicalLogitsWarper`.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._masses: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        """Greedy requests skip it: it is a way of sampling."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch: which row asks for what mass."""
        process_dict_updates(self._masses, batch_update, _mass)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Cut each row that asks for it."""
        for row, mass in self._masses.items():
            logits[row] = _keep_typical(logits[row], mass)
        return logits


def _mass(params: Any, prompt_ids: Any, output_ids: Any) -> float | None:
    value = (params.extra_args or {}).get(ARGUMENT)
    return None if value is None else float(value)


def _keep_typical(logits: torch.Tensor, mass: float) -> torch.Tensor:
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum()
    order = torch.argsort((-logprobs - entropy).abs())
    cumulative = probabilities[order].cumsum(dim=-1)
    count = int((cumulative < mass).sum()) + 1
    return logits.index_fill(0, order[count:], float("-inf"))
