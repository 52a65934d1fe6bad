"""Log probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from handlers.engines.transformers_model import TransformersModel

_CHUNK_ON_CPU, _CHUNK_ON_GPU = 128, 512
"""Tokens in one pass: others wait for it, and the logits of all tokens of a long prompt would take gigabytes."""


class PromptPass:
    """One pass over a prompt for the log probabilities of its tokens but the first, in chunks."""

    def __init__(self, model: TransformersModel, prompt_ids: Sequence[int], want_ranks: bool = False) -> None:
        self._model, self._length, self._want_ranks = model, len(prompt_ids), want_ranks
        self._ids = torch.tensor([list(prompt_ids)], device=model.device)
        self._chunk = _CHUNK_ON_CPU if model.device.type == "cpu" else _CHUNK_ON_GPU
        self._cache: Any = None
        self._place = 0
        self.values: list[float] = []
        """Of the tokens that have been read so far; the log probability of each given those before."""
        self.ranks: list[int] = []
        """The places of the same tokens by probability, from 1; empty unless wanted."""

    @property
    def done(self) -> bool:
        """Nothing is left to be read."""
        return self._place >= self._length - 1

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def read(self) -> None:
        """Read the next chunk; blocks for as long as the model takes."""
        begin, end = self._place, min(self._place + self._chunk, self._length - 1)
        output = self._model.model(input_ids=self._ids[:, begin:end], past_key_values=self._cache, use_cache=True)
        self._cache, self._place = output.past_key_values, end
        logprobs = output.logits[0].float().log_softmax(dim=-1)
        following = self._ids[0, begin + 1 : end + 1]
        own = logprobs.gather(-1, following[:, None])
        self.values += own.squeeze(-1).tolist()
        if self._want_ranks:
            self.ranks += ((logprobs > own).sum(dim=-1) + 1).tolist()


def read_prompt(model: TransformersModel, prompt_ids: Sequence[int], want_ranks: bool) -> PromptPass:
    """A pass over the whole prompt at once; blocks for as long as the model takes."""
    reading = PromptPass(model, prompt_ids, want_ranks)
    while not reading.done:
        reading.read()
    return reading
