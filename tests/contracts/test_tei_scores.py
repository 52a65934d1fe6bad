"""TEI's routes for scores: /rerank with `texts`, and /predict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.pooling import Pooling
from tests.contracts.pooling_exchange import ask

pytestmark = pytest.mark.asyncio
RERANK = {"query": "deep", "texts": ["learning", "fun"]}


async def test_texts_come_by_their_scores_which_pass_a_sigmoid() -> None:
    answer = await ask("/rerank", RERANK, "reranker", [(-1000,), (0,)])
    assert (answer.status, answer.body) == (200, b'[{"index":1,"score":0.5},{"index":0,"score":0.0}]')
    pooling = [Pooling(task="classify", activation=False, cut="right", second=text) for text in RERANK["texts"]]
    assert [request.pooling for request in answer.seen] == pooling
    assert answer.prompts == ["deep", "deep"]
    # The query counts for each text: 2 * 4 + 8 + 3.
    assert answer.headers["x-compute-characters"] == "19"
    assert answer.headers["x-compute-tokens"] == "10"


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"raw_scores": True}, b'[{"index":1,"score":2.0},{"index":0,"score":-1.0}]'),
        (
            {"raw_scores": True, "return_text": True},
            b'[{"index":1,"text":"fun","score":2.0},{"index":0,"text":"learning","score":-1.0}]',
        ),
        ({"raw_scores": True, "top_n": 1}, b'[{"index":1,"score":2.0},{"index":0,"score":-1.0}]'),
    ],
)
async def test_ranks_have_what_was_asked_for(fields: dict[str, Any], body: bytes) -> None:
    assert (await ask("/rerank", RERANK | fields, "reranker", [(-1,), (2,)])).body == body


async def test_of_equal_scores_the_last_is_first_as_in_tei() -> None:
    answer = await ask("/rerank", {"query": "a", "texts": ["b"] * 3, "raw_scores": True}, "reranker", [(1,)])
    assert answer.body == b'[{"index":2,"score":1.0},{"index":1,"score":1.0},{"index":0,"score":1.0}]'


async def test_probabilities_are_those_of_the_functions() -> None:
    ranks = json.loads((await ask("/rerank", RERANK, "reranker", [(-1,), (2,)])).body)
    assert [rank["score"] for rank in ranks] == pytest.approx([0.880797, 0.268941], abs=1e-6)
    labels = json.loads((await ask("/predict", {"inputs": "a"}, "classifier", [(1, 2, 3)])).body)
    assert [label["score"] for label in labels] == pytest.approx([0.665241, 0.244728, 0.090031], abs=1e-6)


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_other_paths_rank_too(path: str) -> None:
    answer = await ask(path, RERANK, "reranker", [(-1000,), (0,)])
    assert answer.body == b'[{"index":1,"score":0.5},{"index":0,"score":0.0}]'


async def test_djls_settings_keep_djls_scores_on_invocations() -> None:
    answer = await ask("/invocations", RERANK, "reranker", [(-1000,), (0,)], scores_in_order=True)
    assert answer.body == b"[[0.0],[0.5]]"


async def test_a_body_with_documents_is_vllms() -> None:
    answer = await ask("/rerank", {"query": "deep", "documents": ["fun"]}, "reranker")
    assert (answer.status, answer.seen) == (501, [])  # The scripted engine has no front end of vLLM.
    assert b"this needs the vLLM engine" in answer.body


LABELS = b'[{"score":1.0,"label":"so-so"},{"score":0.0,"label":"joy"},{"score":0.0,"label":"sad"}]'
RAW = b'[{"score":3.0,"label":"joy"},{"score":2.0,"label":"so-so"},{"score":1.0,"label":"sad"}]'


@pytest.mark.parametrize(
    ("inputs", "sent", "body"),
    [
        ("fun", [("fun", None)], RAW),
        (["fun"], [("fun", None)], RAW),
        (["deep", "fun"], [("deep", "fun")], RAW),
        ([["fun"]], [("fun", None)], b"[%b]" % RAW),
        ([["fun"], ["a", "b"]], [("fun", None), ("a", "b")], b"[%b,%b]" % (RAW, RAW)),
    ],
)
async def test_two_texts_are_a_pair_and_lists_are_a_batch(inputs: Any, sent: Any, body: bytes) -> None:
    answer = await ask("/predict", {"inputs": inputs, "raw_scores": True}, "classifier", [(1, 2, 3)])
    assert (answer.status, answer.body) == (200, body)
    assert [(request.prompt, request.pooling.second) for request in answer.seen if request.pooling] == sent


@pytest.mark.parametrize("path", ["/predict", "/"])
async def test_several_labels_pass_a_softmax(path: str) -> None:
    answer = await ask(path, {"inputs": "fun"}, "classifier", [(-1000, 1000, -1000)])
    assert answer.body == LABELS
    assert answer.seen[0].pooling == Pooling(task="classify", activation=False, cut="right")


async def test_one_label_passes_a_sigmoid() -> None:
    answer = await ask("/predict", {"inputs": ["deep", "fun"]}, "reranker", [(0,)])
    assert answer.body == b'[{"score":0.5,"label":"LABEL_0"}]'


@pytest.mark.parametrize("path", ["/rerank", "/predict"])
async def test_scores_that_are_no_numbers_are_an_error(path: str) -> None:
    document = {"query": "a", "texts": ["b"], "inputs": "a"}
    answer = await ask(path, document, "reranker", [(float("nan"),)])
    assert (answer.status, answer.body) == (424, b'{"error":"score is NaN","error_type":"Backend"}')
