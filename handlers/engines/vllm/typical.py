"""Locally typical sampling for vLLM, which has none: lmi-dist's `typical_p`.

Runs inside vLLM's engine process, as a custom logits processor. vLLM has two interfaces for these, one for each of its
model runners: the newer runner is the default on a GPU and takes none but its own. Both processors cut the same tokens,
all rows of a step that ask for it at once, without waiting for the device. They differ where `min_p` is given too: the
older runner applies it before, the newer one after.

Written for vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as NewLogitsProcessor

ARGUMENT = "typical_p"


def load_typical(config: VllmConfig) -> str:
    """Have the engine load the processor that fits its model runner.

    Returns why it cannot, as the rest of a sentence that begins with the parameter's name; "" if it can.
    """
    if config.speculative_config is not None:
        return "cannot be used together with speculative decoding"
    if config.model_config.return_sampling_mask:
        return "cannot be used together with option.return_sampling_mask"
    processor = TypicalProcessor if config.use_v2_model_runner else TypicalLogitsProcessor
    own = f"{processor.__module__}:{processor.__qualname__}"
    config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), own]
    return ""


def is_atypical(logits: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Which tokens locally typical sampling takes away; one mass for each row.

    It keeps the tokens whose information content is nearest to the distribution's entropy, up to that mass: Meister et
    al., "Locally Typical Sampling" (2022). The same tokens as transformers' `TypicalLogitsWarper`.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(dim=-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    nearest, order = distance.sort(dim=-1)
    cumulative = probabilities.gather(-1, order).cumsum(dim=-1)
    last = (cumulative < masses.unsqueeze(-1)).sum(dim=-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
    return distance > nearest.gather(-1, last)


class TypicalLogitsProcessor(LogitsProcessor):
    """For the older model runner, which also serves on CPUs."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._device = device
        self._wanted: dict[int, float] = {}
        self._rows = self._masses = torch.empty(0)

    def is_argmax_invariant(self) -> bool:
        """Greedy requests skip it: it is a way of sampling."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch: which row asks for what mass."""
        if process_dict_updates(self._wanted, batch_update, lambda params, _, __: _mass(params)):
            self._rows = async_tensor_h2d(list(self._wanted), self._device, torch.int64)
            self._masses = async_tensor_h2d(list(self._wanted.values()), self._device, torch.float32)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Cut the rows that ask for it. The logits have been divided by the temperature."""
        if self._wanted:
            _cut(logits, self._rows, logits[self._rows], self._masses)
        return logits


class TypicalProcessor(NewLogitsProcessor):
    """For the newer model runner, which hands over logits before they are divided by the temperature."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._device = req_states.device
        self._masses = np.ones(req_states.max_num_reqs, np.float32)
        self._temperatures = np.ones(req_states.max_num_reqs, np.float32)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take what the request in this place asks for; greedy ones ask for nothing."""
        mass = _mass(sampling_params) if sampling_params.temperature > 0 else None
        self._masses[req_idx] = 1.0 if mass is None else mass
        self._temperatures[req_idx] = sampling_params.temperature
        return mass is not None

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Cut the rows that ask for it; without speculative decoding each request has one row."""
        rows = np.flatnonzero(self._masses[ctx.idx_mapping_np] < 1.0)
        if rows.size:
            places = ctx.idx_mapping_np[rows]
            masses, temperatures = async_tensor_h2d(
                np.stack((self._masses[places], self._temperatures[places])), self._device
            )
            on_device = async_tensor_h2d(rows, self._device)
            _cut(logits, on_device, logits[on_device] / temperatures.unsqueeze(-1), masses)
        return logits


def _cut(logits: torch.Tensor, rows: torch.Tensor, scaled: torch.Tensor, masses: torch.Tensor) -> None:
    logits.index_copy_(0, rows, logits[rows].masked_fill(is_atypical(scaled, masses), float("-inf")))


def _mass(params: Any) -> float | None:
    """None: the request does not ask for it."""
    value = (params.extra_args or {}).get(ARGUMENT)
    return None if value is None or value >= 1.0 else float(value)
