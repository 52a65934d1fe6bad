"""TEI's routes for vectors: /embed, /embed_all, /embed_sparse, /similarity."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from engines.pooling import Pooling
from engines.request import TokenDelta
from handlers.tei.answer import Vectors
from tests.contracts.pooling_exchange import ask

pytestmark = pytest.mark.asyncio
QUARTER = (0.1, -0.2, 0.25, 1e-7)


async def test_one_text_gets_a_list_with_one_vector() -> None:
    answer = await ask("/embed", {"inputs": "deep learning"}, numbers=[QUARTER])
    assert (answer.status, answer.body) == (200, b"[[0.1,-0.2,0.25,1e-7]]")
    assert answer.headers["content-type"] == "application/json"


async def test_each_text_gets_a_vector_in_order() -> None:
    answer = await ask("/embed", {"inputs": ["deep", "日本"]}, numbers=[(1, 0, 0, 0), (0, 1, 0, 0)])
    assert answer.body == b"[[1.0,0.0,0.0,0.0],[0.0,1.0,0.0,0.0]]"
    assert answer.prompts == ["deep", "日本"]


async def test_headers_have_the_means_of_the_times_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    answer = Vectors(2, 16)
    now = 102.0
    for prompt, (submitted_at, queued) in enumerate([(100.25, 0.125), (100.75, 0.25)]):
        numbers = np.array(QUARTER, np.float32)
        answer.feed(
            prompt, TokenDelta("", last=True, numbers=numbers, submitted_at=submitted_at, queued_seconds=queued)
        )
    headers = dict(answer.headers)
    assert [headers[f"x-{name}-time"] for name in ("total", "tokenization", "queue", "inference")] == [
        *("2000", "500", "187", "1312"),
    ]


async def test_headers_have_counts_and_whole_milliseconds() -> None:
    answer = await ask("/embed", {"inputs": ["deep learning", [4, 5, 6]]})
    times = ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")
    assert [answer.headers[name].isdigit() for name in times] == [True] * 5
    # 13 characters and 3 ids. The text has two special tokens.
    shown = {name: answer.headers[name] for name in ("x-compute-type", "x-compute-characters", "x-compute-tokens")}
    assert shown == {"x-compute-type": "gpu+optimized", "x-compute-characters": "16", "x-compute-tokens": "7"}


@pytest.mark.parametrize(
    ("fields", "activation", "body"),
    [
        ({}, True, b"[[3.0,0.0,4.0,0.0]]"),  # The engine scales: these numbers are its own.
        ({"normalize": False}, False, b"[[3.0,0.0,4.0,0.0]]"),
        ({"dimensions": 3}, False, b"[[0.6,0.0,0.8]]"),
        ({"dimensions": 1}, False, b"[[1.0]]"),
        ({"dimensions": 3, "normalize": False}, False, b"[[3.0,0.0,4.0]]"),
        ({"dimensions": 4}, False, b"[[0.6,0.0,0.8,0.0]]"),
        ({"dimensions": None}, True, b"[[3.0,0.0,4.0,0.0]]"),
    ],
)
async def test_vectors_are_cut_before_they_are_scaled(fields: dict[str, Any], activation: bool, body: bytes) -> None:
    answer = await ask("/embed", {"inputs": "deep", **fields}, numbers=[(3, 0, 4, 0)])
    assert answer.body == body
    assert answer.seen[0].pooling == Pooling(task="embed", activation=activation, cut="right")


async def test_a_vector_of_zeros_has_no_direction() -> None:
    assert (await ask("/embed", {"inputs": "a", "dimensions": 2}, numbers=[(0, 0, 1, 0)])).body == b"[[null,null]]"


@pytest.mark.parametrize(
    ("inputs", "prompts", "special"),
    [
        ([4, 5], ["deep learning"], [False]),
        ([[4, 5], "fun", [2, 7]], ["deep learning", "fun", "[CLS] fun"], [False, True, False]),
        ([[4, 5]], ["deep learning"], [False]),
    ],
)
async def test_ids_are_decoded_and_get_no_special_tokens(inputs: Any, prompts: list[str], special: list[bool]) -> None:
    answer = await ask("/embed", {"inputs": inputs})
    assert answer.status == 200
    assert answer.prompts == prompts
    assert [request.add_special_tokens for request in answer.seen] == special


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
async def test_a_named_prompt_goes_in_front_of_texts_and_ids(path: str) -> None:
    document = {"inputs": ["deep", [2, 5]], "prompt_name": "query"}
    answer = await ask(path, document)
    assert answer.prompts == ["query : deep", "query : learning"]
    assert [request.add_special_tokens for request in answer.seen] == [True, True]


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
async def test_the_default_prompt_goes_in_front_if_a_request_names_none(path: str) -> None:
    for document, prompts in (
        ({"inputs": ["deep", [2, 5]]}, ["is deep", "is learning"]),
        ({"inputs": "deep", "prompt_name": "query"}, ["query : deep"]),
        ({"inputs": "deep", "prompt_name": "document"}, ["deep"]),
    ):
        assert (await ask(path, document, default_prompt="is ")).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "settings", "cut"),
    [
        ({}, {}, "right"),
        ({}, {"auto_truncate": False}, None),
        ({"truncate": None}, {}, "right"),
        ({"truncate": True}, {"auto_truncate": False}, "right"),
        ({"truncate": False}, {}, None),
        ({"truncation_direction": "Left"}, {}, "left"),
        ({"truncation_direction": "left"}, {}, "left"),
        ({"truncation_direction": "Right"}, {}, "right"),
        ({"truncation_direction": "Left", "truncate": False}, {}, None),
    ],
)
async def test_texts_are_cut_as_the_request_or_the_setting_says(
    fields: dict[str, Any], settings: dict[str, Any], cut: str | None
) -> None:
    answer = await ask("/embed", {"inputs": "deep", **fields}, **settings)
    pooling = answer.seen[0].pooling
    assert pooling is not None
    assert pooling.cut == cut


async def test_every_token_gets_a_vector_as_the_model_has_it() -> None:
    numbers = [[(3, 0, 4, 0), (0, 0, 0, 0.5)]]
    answer = await ask("/embed_all", {"inputs": "deep"}, numbers=numbers)
    assert answer.body == b"[[[3.0,0.0,4.0,0.0],[0.0,0.0,0.0,0.5]]]"
    assert answer.seen[0].pooling == Pooling(task="token_embed", activation=False, cut="right")


async def test_sparse_vectors_leave_out_zeros() -> None:
    answer = await ask("/embed_sparse", {"inputs": ["deep", "fun"]}, "sparse", [(0, 0.4, 0, -1), (0, 0, 0, 0)])
    assert answer.body == b'[[{"index":1,"value":0.4},{"index":3,"value":-1.0}],[]]'
    assert answer.seen[0].pooling == Pooling(task="embed", activation=False, cut="right")


async def test_similarity_is_the_cosine_with_the_first_sentence() -> None:
    document: dict[str, Any] = {"inputs": {"source_sentence": "deep", "sentences": ["learning", "fun", "a"]}}
    vectors = [(3, 0, 4, 0), (6, 0, 8, 0), (0, 1, 0, 0), (3, 0, -4, 0)]
    for parameters in ({}, {"parameters": None}, {"parameters": {}}):
        answer = await ask("/similarity", document | parameters, numbers=vectors)
        assert answer.body == b"[1.0,0.0,-0.28]"
        assert answer.prompts == ["deep", "learning", "fun", "a"]
    assert answer.headers["x-compute-characters"] == "16"


async def test_parameters_of_similarity_hold_for_all_sentences() -> None:
    parameters = {"truncate": True, "truncation_direction": "Left", "prompt_name": "query"}
    document = {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": parameters}
    answer = await ask("/similarity", document, auto_truncate=False)
    assert answer.prompts == ["query : a", "query : b"]
    assert [request.pooling.cut for request in answer.seen if request.pooling] == ["left", "left"]


async def test_the_root_has_vectors_sparse_vectors_or_similarities() -> None:
    assert (await ask("/", {"inputs": "deep"}, numbers=[(1, 0, 0, 0)])).body == b"[[1.0,0.0,0.0,0.0]]"
    assert (await ask("/", {"inputs": "a"}, "sparse", [(1, 0, 0, 0)])).body == b'[[{"index":0,"value":1.0}]]'
    document = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
    assert (await ask("/", document)).body == b"[1.0]"
    assert json.loads((await ask("/", {"inputs": ["source_sentence"]})).body) == [[0.5, 0.5, 0.5, 0.5]]


async def test_invocations_takes_similarity() -> None:
    document = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
    assert (await ask("/invocations", document)).body == b"[1.0]"
    assert (await ask("/invocations", {"inputs": {"source_sentence": "a", "sentences": []}})).status == 400
    assert json.loads((await ask("/invocations", {"inputs": ["source_sentence"]})).body) == [[0.5, 0.5, 0.5, 0.5]]
