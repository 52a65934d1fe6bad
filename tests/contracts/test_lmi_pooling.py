"""LMI's contracts for vectors, scores and classes, with models that `requests/lmi_vectors.yaml` does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.pooling import Pooling, PoolingModel, kind_of_model
from engines.request import GenerationRequest, TokenDelta
from handlers.contract import Contract, Reply
from handlers.lmi.vectors.contracts import pooling_contract
from tests.contracts.exchange import MODEL, call, outcome, refusal_of
from tests.settings import configured

EMBEDDING = PoolingModel(kind="embedding", task="embed", tasks=frozenset({"embed"}), vector_size=2)
RERANKER = PoolingModel(kind="reranker", task="classify", tasks=frozenset({"classify"}), vector_size=0)
CLASSIFIER = PoolingModel(
    kind="classifier",
    task="classify",
    tasks=frozenset({"classify"}),
    vector_size=0,
    labels={0: "bad", 1: "good"},
)
OTHER = PoolingModel(kind="late interaction", task="token_embed", tasks=frozenset({"token_embed"}), vector_size=2)


def contract(model: PoolingModel, **settings: Any) -> Contract:
    return pooling_contract(configured(MODEL, **settings), model)


def requests(model: PoolingModel, document: Any, **settings: Any) -> list[tuple[Any, Pooling | None]]:
    parsed = contract(model, **settings).parse(call(document)).requests
    return [(request.prompt, request.pooling) for request in parsed]


def answer(model: PoolingModel, document: Any, *numbers: list[float], **settings: Any) -> bytes:
    exchange = contract(model, **settings).parse(call(document))
    assert len(exchange.requests) == len(numbers)
    # The engine's order differs from the order of the prompts.
    parts = [
        exchange.answer.feed(place, TokenDelta("", last=True, numbers=np.array(one, np.float32)))
        for place, one in reversed(list(enumerate(numbers)))
    ]
    assert not any(parts[:-1])
    return parts[-1]


# Vectors


def test_lmis_vllm_handler_takes_texts_in_lower_case_if_the_model_says_so() -> None:
    model, given = replace(EMBEDDING, lower_case=True), {"inputs": ["Hello"]}
    assert requests(model, given, vector_format="vllm")[0][0] == "hello"
    assert requests(model, given)[0][0] == "Hello"


# TEI's options beside `inputs`


def test_a_model_without_prompts_has_none_of_a_name() -> None:
    assert (
        b"config_sentence_transformers.json"
        in refusal_of(contract(EMBEDDING), call({"inputs": "a", "prompt_name": "query"})).body
    )


# Scores of pairs


def test_pairs_keep_their_order() -> None:
    pair = {"text": "q", "text_pair": "d"}
    assert answer(RERANKER, [pair, {"key": "q", "value": "e"}], [0.0], [-100.0]) == b"[[0.5],[3.8e-44]]"
    pooling = Pooling(task="classify", activation=False, second="d", cut="right")
    assert requests(RERANKER, {"inputs": pair}) == [("q", pooling)]


# Classes


@pytest.mark.parametrize(
    ("problem_type", "score"),
    [
        ("", b'"score":0.88079'),  # softmax
        ("single_label_classification", b'"score":0.88079'),
        ("multi_label_classification", b'"score":0.95257'),  # sigmoid
        ("regression", b'"score":3.0'),
    ],
)
def test_a_pipelines_scores_depend_on_the_models_problem(problem_type: str, score: bytes) -> None:
    model = replace(CLASSIFIER, problem_type=problem_type)
    assert score in answer(model, {"inputs": "a"}, [1.0, 3.0])


# Errors


def test_a_model_without_a_form_of_lmi_names_the_route() -> None:
    reply = refusal_of(contract(OTHER), call({"inputs": "a"}))
    assert reply.status == 424
    assert b"late interaction; send `input` as to /pooling" in reply.body


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["inputs", "text", "text_pair", "key", "value", "query", "texts", "parameters", "top_k", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(_JSON, st.sampled_from([EMBEDDING, RERANKER, CLASSIFIER]), st.booleans(), st.sampled_from(["djl", "vllm"]))
def test_every_body_is_answered_or_refused(document: Any, model: PoolingModel, in_order: bool, form: str) -> None:
    exchange = outcome(contract(model, djl_engine=in_order, vector_format=form), call(document))
    if isinstance(exchange, Reply):
        assert exchange.status in (400, 424)
        return
    numbers = np.array([0.5, 0.25], np.float32)
    parts = [
        exchange.answer.feed(place, TokenDelta("", last=True, numbers=numbers))
        for place in range(len(exchange.requests))
    ]
    assert parts[-1]
    assert all(isinstance(request, GenerationRequest) and request.pooling for request in exchange.requests)


def test_the_kind_of_a_model_follows_from_its_task_and_labels() -> None:
    assert [kind_of_model("classify", labels) for labels in (1, 2)] == ["reranker", "classifier"]
    assert kind_of_model("token_embed", 0) == "late interaction"
