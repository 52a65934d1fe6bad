"""TEI's answers. The bytes match serde_json's: no spaces, and keys in the order of TEI's structs.

Source: TEI's router 1.9, `src/http/server.rs` and `src/http/types.rs`, and `core/src/infer.rs`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.errors import RequestError
from engines.request import TokenDelta
from handlers.answers.pooled_answer import PooledAnswer, encode, json_fragment, normalized, shortened, sigmoid, softmax
from handlers.contract import Reply
from handlers.tei.errors import TeiRefusal, refuse


class TeiAnswer(PooledAnswer):
    """One document, with TEI's headers."""

    def __init__(self, prompts: int, characters: int) -> None:
        """Create the answer.

        Args:
            prompts: The number of prompts.
            characters: The total length of the prompts in characters. Each token id counts as one character.
        """
        super().__init__(prompts)
        self._characters, self._begun_at = characters, time.monotonic()
        self._tokenization = self._queue = 0.0  # The sums over all prompts, in seconds.

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        self._tokenization += delta.submitted_at - self._begun_at
        self._queue += delta.queued_seconds
        return super().feed(prompt, delta)

    def document(self, parts: Sequence[Any]) -> bytes:
        body = encode(self.content(parts))
        # Times are in milliseconds. As in TEI, the times of tokenization and of the queue are means over the prompts.
        total = time.monotonic() - self._begun_at
        tokenization, queue = self._tokenization / len(parts), self._queue / len(parts)
        self.headers = (
            ("x-compute-type", "gpu+optimized"),
            ("x-compute-time", _milliseconds(total)),
            ("x-compute-characters", str(self._characters)),
            ("x-compute-tokens", str(self.prompt_tokens)),
            ("x-total-time", _milliseconds(total)),
            ("x-tokenization-time", _milliseconds(tokenization)),
            ("x-queue-time", _milliseconds(queue)),
            ("x-inference-time", _milliseconds(total - tokenization - queue)),
        )
        return body

    def content(self, parts: Sequence[Any]) -> Any:
        """Return the content of the document. See `PooledAnswer.document`."""
        return parts

    def fail(self, error: RequestError) -> Reply:
        return refuse(error)


class Vectors(TeiAnswer):
    """A vector for each text, or a vector for each token of each text."""

    def __init__(self, prompts: int, characters: int, dimensions: int | None = None, normalize: bool = False) -> None:
        """Create the answer.

        Args:
            prompts: See `TeiAnswer`.
            characters: See `TeiAnswer`.
            dimensions: Each vector is cut to this number of entries. None keeps all entries.
            normalize: True scales each vector to the norm 1 after the cut, because the engine has not scaled it.
        """
        super().__init__(prompts, characters)
        self._dimensions, self._normalize = dimensions, normalize

    def part(self, numbers: Any) -> Any:
        return json_fragment(shortened(numbers, self._dimensions, normalize=self._normalize))


class SparseVectors(TeiAnswer):
    """The nonzero entries of each vector."""

    def part(self, numbers: Any) -> Any:
        return json_fragment([{"index": int(index), "value": numbers[index]} for index in np.flatnonzero(numbers)])


class Similarities(TeiAnswer):
    """The cosine similarity of the first vector to each other vector."""

    def content(self, numbers: Sequence[Any]) -> Any:
        source, *others = (normalized(vector.astype(np.float64)) for vector in numbers)
        return [np.float32(source @ other) for other in others]


class Ranks(TeiAnswer):
    """The texts, ordered by score, the best first."""

    def __init__(self, texts: Sequence[str], characters: int, *, raw: bool, with_text: bool) -> None:
        """Create the answer.

        Args:
            characters: See `TeiAnswer`.
            raw: True returns the model's raw scores (logits) instead of probabilities.
            with_text: True repeats the texts.
        """
        super().__init__(len(texts), characters)
        self._texts, self._raw, self._with_text = texts, raw, with_text

    def content(self, numbers: Sequence[Any]) -> Any:
        scores = np.concatenate([probabilities(raw, keep=self._raw) for raw in numbers])
        return [
            {"index": int(i), **({"text": self._texts[i]} if self._with_text else {}), "score": scores[i]}
            for i in best_first(scores)
        ]


class Predictions(TeiAnswer):
    """The scores of all labels for each text, the best first."""

    def __init__(self, prompts: int, characters: int, labels: Mapping[int, str], *, raw: bool, in_batch: bool) -> None:
        """Create the answer.

        Args:
            prompts: See `TeiAnswer`.
            characters: See `TeiAnswer`.
            labels: The names of the classes, keyed by the class's index.
            raw: True returns the model's raw scores (logits) instead of probabilities.
            in_batch: True if the texts came as a batch. The answer is then a list of lists.
        """
        super().__init__(prompts, characters)
        self._labels, self._raw, self._in_batch = labels, raw, in_batch

    def content(self, numbers: Sequence[Any]) -> Any:
        texts = [self._scored(probabilities(raw, keep=self._raw)) for raw in numbers]
        return texts if self._in_batch else texts[0]

    def _scored(self, scores: Any) -> list[dict[str, Any]]:
        return [
            {"score": scores[number], "label": self._labels.get(int(number), f"LABEL_{number}")}
            for number in best_first(scores)
        ]


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


def probabilities(raw: Any, *, keep: bool) -> Any:
    """Return the sigmoid of a single score, or the softmax of several scores.

    Args:
        raw: The model's raw scores (logits) for one prompt.
        keep: True returns `raw` unchanged.
    """
    if keep:
        return raw
    return sigmoid(raw) if len(raw) == 1 else softmax(raw)


def best_first(scores: Any) -> Any:
    """Return the indices of the scores, the best first. If scores are equal, the last of them comes first, as in TEI.

    Raises:
        TeiRefusal: A score is not a number.
    """
    if np.isnan(scores).any():
        raise TeiRefusal("Backend", "score is NaN")
    return np.argsort(scores, kind="stable")[::-1]
