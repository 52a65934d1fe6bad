"""Pooling: a model turns a prompt into vectors or scores instead of text.

An embedding model makes a vector, a reranker makes one score, and a classifier makes a score for each label.
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
    """The kind of vectors or scores that a request asks for."""

    task: PoolingTask
    # True: vectors are scaled to length 1, and the model's function (a sigmoid, or a softmax) is applied to scores.
    # False: vectors and scores are raw. None: the model's files decide.
    activation: bool | None = None
    # The second text of a pair. None: the prompt is a single text.
    second: str | None = None
    # The side at which a prompt that is too long for the model is cut. None: such a prompt is refused.
    cut: Side | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModel:
    """A model without text generation, as contracts see it."""

    kind: ModelKind
    task: PoolingTask  # The task of a request that names no task.
    tasks: frozenset[str]  # All tasks of the model.
    vector_size: int  # The number of dimensions of a vector. 0 if the model makes no vectors.
    labels: Mapping[int, str] = field(default_factory=dict)  # The names of the classes by their numbers.
    # The method that makes one vector from the tokens' vectors, by vLLM's name: "CLS", "MEAN" or "LAST". "SPLADE": the
    # vector has a weight for each token of the vocabulary.
    pooling: str = ""
    dtype: str = ""  # The type of the weights, such as "float16".
    # The value in transformers' configuration: "regression", "single_label_classification" or
    # "multi_label_classification". Empty if the model's files have none.
    problem_type: str = ""
    # Whether vLLM's front end converts texts to lower case (sentence-transformers' `do_lower_case`).
    lower_case: bool = False
    # The reason why the model cannot score two texts that are tokenized together. Empty if it can.
    pairs_refusal: str = ""
    # The prefixes for texts, keyed by name (sentence-transformers' `prompts`).
    prompts: Mapping[str, str] = field(default_factory=dict)
    # The prefix for requests that name no prefix. TEI's routes put it in front of texts, and LMI's routes only in front
    # of texts that become vectors.
    default_prompt: str | None = None


def kind_of_model(task: PoolingTask, labels: int) -> ModelKind:
    """Return the kind of a model with this task and number of labels."""
    match task:
        case "embed":
            return "embedding"
        case "token_embed":
            return "late interaction"
        case "classify":
            return "reranker" if labels == 1 else "classifier"
        case "token_classify":
            return "token classifier"
