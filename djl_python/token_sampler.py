"""Chooses tokens from logits: greedy, or sampling where a request asks for it (contracts/lmi.md section 5.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djl_python.lazy_import import require

_SAMPLING = ("temperature", "top_p", "top_k", "typical_p")


class TokenSampler:
    """One request's way of choosing tokens."""

    def __init__(self, parameters: Mapping[str, Any], device: Any) -> None:
        """Raises ValueError for a parameter that is out of its range."""
        self._torch = require("torch", "Sampling")
        asked = any(parameters.get(name) is not None for name in _SAMPLING) or bool(parameters.get("do_sample"))
        self._samples = asked and parameters.get("temperature") != 0
        self._processors = _processors(parameters, self._samples)
        self._generator = None
        if parameters.get("manual_seed") is not None:
            self._generator = self._torch.Generator(device).manual_seed(int(parameters["manual_seed"]))

    def choose(self, tokens: Any, logits: Any) -> Any:
        """The next token of each prompt, as a column; `tokens` are those before it."""
        scores = self._processors(tokens, logits)
        if not self._samples:
            return scores.argmax(-1, keepdim=True)
        return self._torch.multinomial(scores.softmax(-1), num_samples=1, generator=self._generator)


def _processors(parameters: Mapping[str, Any], samples: bool) -> Any:
    transformers = require("transformers", "Sampling")
    chosen = transformers.LogitsProcessorList()
    penalty = parameters.get("repetition_penalty")
    if penalty not in (None, 1.0):
        chosen.append(transformers.RepetitionPenaltyLogitsProcessor(penalty=float(penalty)))
    if not samples:
        return chosen
    temperature, top_k = parameters.get("temperature"), parameters.get("top_k")
    if temperature not in (None, 1.0):
        chosen.append(transformers.TemperatureLogitsWarper(float(temperature)))
    if top_k:
        chosen.append(transformers.TopKLogitsWarper(int(top_k)))
    for name, warper in (("top_p", transformers.TopPLogitsWarper), ("typical_p", transformers.TypicalLogitsWarper)):
        value = parameters.get(name)
        if value is not None and value < 1.0:
            chosen.append(warper(float(value)))
    return chosen
