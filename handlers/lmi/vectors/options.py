"""The options of a call for vectors. The options are fields next to `inputs`, as in bodies for TEI's `/invocations`.

LMI has no such options. TEI's image on SageMaker accepts them on the same route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engines.errors import InvalidParameter
from engines.pooling import Pooling, PoolingModel, Side
from engines.request import GenerationRequest, pooling_request
from handlers.answers.pooled_answer import shortened
from handlers.parsing.json_fields import ParameterReader, shown

FIELDS = frozenset({"normalize", "truncate", "truncation_direction", "prompt_name", "dimensions"})
_SIDES: Mapping[str, Side] = {"left": "left", "Left": "left", "right": "right", "Right": "right"}


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """The vectors that a call asks for."""

    pooling: Pooling
    front: str = ""  # The prefix of each text.
    dimensions: int | None = None  # Each vector is cut to this number of entries. None keeps all entries.
    normalize_kept: bool = False  # Whether the kept entries are scaled to the length 1.

    def request(self, prompt: str | tuple[int, ...]) -> GenerationRequest:
        """Return the request for a text or token ids, without its id.

        Raises:
            InvalidParameter: Token ids cannot have a prefix.
        """
        if not self.front:
            return pooling_request(prompt, self.pooling)
        if not isinstance(prompt, str):
            raise InvalidParameter("inputs", "must be texts if a prompt goes in front of them, got token ids")
        return pooling_request(self.front + prompt, self.pooling)

    def vector(self, numbers: Any) -> Any:
        """Return the engine's vector in the form that the call asks for."""
        if self.dimensions is None:
            return numbers
        return shortened(numbers, self.dimensions, normalize=self.normalize_kept)


class VectorDefaults:
    """Reads the options of a call. An option that the call does not set has its default."""

    def __init__(self, model: PoolingModel, *, normalize: bool, cut: Side | None) -> None:
        """Create the defaults.

        Args:
            model: The model.
            normalize: True if vectors have the length 1.
            cut: The side at which texts that are too long are cut. None refuses such texts.
        """
        self._model = model
        self._pooling = Pooling(task="embed", activation=normalize, cut=cut)
        self._options = VectorOptions(self._pooling, model.default_prompt or "")

    def read(self, document: Any) -> VectorOptions:
        """Return the options of a body.

        Raises:
            InvalidParameter: An option is invalid.
        """
        if not isinstance(document, dict) or document.keys().isdisjoint(FIELDS):
            return self._options
        given = ParameterReader(document)
        dimensions = given.optional_integer("dimensions", minimum=1, maximum=self._model.vector_size)
        normalize = given.boolean("normalize", bool(self._pooling.activation))
        # The engine scales vectors to the length 1, unless they have to be cut first.
        pooling = msgspec.structs.replace(
            self._pooling, activation=normalize and dimensions is None, cut=self._cut(given)
        )
        return VectorOptions(pooling, self._front(given), dimensions, normalize and dimensions is not None)

    def _cut(self, given: ParameterReader) -> Side | None:
        direction = given.optional_string("truncation_direction") or "right"
        if direction not in _SIDES:
            raise InvalidParameter("truncation_direction", f"must be left or right, got {shown(direction)}")
        return _SIDES[direction] if given.boolean("truncate", self._pooling.cut is not None) else None

    def _front(self, given: ParameterReader) -> str:
        name, prompts = given.optional_string("prompt_name"), self._model.prompts
        if name is None:
            return self._model.default_prompt or ""
        if name not in prompts:
            known = ", ".join(prompts) if prompts else "it has none in config_sentence_transformers.json"
            raise InvalidParameter("prompt_name", f"must be one of the model's prompts: {known}")
        return prompts[name]
