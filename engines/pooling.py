"""Pooling: a model makes numbers of a prompt, in place of text.

An embedding model makes a vector, a reranker one score, a classifier a score for each label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]  # vLLM's names.
ModelKind = Literal["embedding", "late interaction", "reranker", "classifier", "token classifier"]
Side = Literal["left", "right"]


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that a request wants of its prompt."""

    task: PoolingTask
    # Vectors have the length 1, and scores pass the model's function (a sigmoid, or a softmax). None: as the model's
    # own files say. False: the raw numbers.
    activation: bool | None = None
    # The second text of a pair. None: the prompt is a single text.
    second: str | None = None
    # The side at which a prompt that is too long for the model is cut. None: it is refused.
    cut: Side | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModel:
    """A model without text generation, as contracts see it."""

    kind: ModelKind
    task: PoolingTask  # The task of a request that does not say.
    tasks: frozenset[str]  # All tasks of the model.
    vector_size: int  # Numbers of a vector. 0 if the model makes none.
    labels: Mapping[int, str] = field(default_factory=dict)  # The names of the classes by their numbers.
    # The way from the tokens' vectors to one, in vLLM's words: "CLS", "MEAN", "LAST". "SPLADE": the vector has a weight
    # for each token of the vocabulary.
    pooling: str = ""
    dtype: str = ""  # The type of the weights, such as "float16".
    # As in transformers' configuration: "regression", "single_label_classification", "multi_label_classification".
    # Empty if the model's files do not say.
    problem_type: str = ""
    lower_case: bool = False  # vLLM's front end takes texts in lower case (sentence-transformers' `do_lower_case`).
    pairs_refusal: str = ""  # The reason if pairs of texts cannot be scored by tokenizing them together, else empty.
    # Texts that go in front of a prompt, by their names (sentence-transformers' `prompts`).
    prompts: Mapping[str, str] = field(default_factory=dict)
    # The text that goes in front of texts on TEI's routes, and of texts for vectors on LMI's, if a request names none.
    default_prompt: str | None = None


def kind_of_model(task: PoolingTask, labels: int) -> ModelKind:
    """Return the kind of a model by its task and its number of labels."""
    match task:
        case "embed":
            return "embedding"
        case "token_embed":
            return "late interaction"
        case "classify":
            return "reranker" if labels == 1 else "classifier"
        case "token_classify":
            return "token classifier"
