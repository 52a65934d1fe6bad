"""The answer to a call of a pooling model. It contains the vectors or scores of all prompts of the call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from engines.request import TokenDelta
from handlers.contract import JSON, Answer

_LARGEST_EXPONENT = 700.0  # The exponential of this number still fits into a float64.


def encode(document: Any) -> bytes:
    """Return compact JSON. A float32 is written with the fewest digits that identify it."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def json_fragment(content: Any) -> orjson.Fragment:
    """Return content as JSON that `encode` puts into a document unchanged."""
    return orjson.Fragment(encode(content))


def sigmoid(numbers: Any) -> Any:
    """Return the logistic function of each number."""
    exact = np.clip(numbers.astype(np.float64), -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return (1.0 / (1.0 + np.exp(-exact))).astype(np.float32)


def softmax(numbers: Any) -> Any:
    """Return probabilities whose sum is 1."""
    powers = np.exp(numbers - numbers.max())
    return powers / powers.sum()


def normalized(vector: Any) -> Any:
    """Return the vector, scaled to the length 1."""
    with np.errstate(divide="ignore", invalid="ignore"):  # A vector of zeros becomes a vector of NaN, as in TEI.
        return vector * (1.0 / np.linalg.norm(vector.astype(np.float64), axis=-1, keepdims=True)).astype(vector.dtype)


def shortened(vector: Any, dimensions: int | None, *, normalize: bool) -> Any:
    """Return the first components of a vector, or of each row of a matrix.

    Args:
        vector: The vector.
        dimensions: The number of components to keep. None keeps all.
        normalize: Whether to scale the shortened vector to the length 1.
    """
    kept = vector[..., :dimensions]
    # orjson takes only contiguous arrays.
    return np.ascontiguousarray(normalized(kept) if normalize else kept)


class PooledAnswer(Answer):
    """One document, which is sent when the results of all prompts have arrived."""

    content_type = JSON

    def __init__(self, prompts: int) -> None:
        self._parts: list[Any] = [None] * prompts
        self._open = prompts
        self.prompt_tokens = 0  # The sum over all prompts.

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        self._parts[prompt] = self.part(delta.numbers)
        self.prompt_tokens += delta.prompt_token_count
        self._open -= 1
        return b"" if self._open else self.document(self._parts)

    def part(self, numbers: Any) -> Any:
        """Return the part of the document that answers one prompt.

        Subclasses encode vectors here, one prompt at a time. Encoding a long list of vectors at once would block the
        event loop for seconds.

        Args:
            numbers: The result for the prompt, an array of float32.
        """
        return numbers

    @abstractmethod
    def document(self, parts: Sequence[Any]) -> bytes:
        """Return the body of the reply.

        Args:
            parts: The part of each prompt.
        """
