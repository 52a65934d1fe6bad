"""The requests of TEI's routes for vectors, scores and classes, and the times in their headers.

`cases/tei` has the bytes of the answers.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engines.pooling import Pooling
from engines.request import TokenDelta
from handlers.tei.answer import Vectors
from tests.contracts.pooling_exchange import Kind, ask

pytestmark = pytest.mark.asyncio
QUARTER = (0.1, -0.2, 0.25, 1e-7)


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


async def test_headers_have_whole_milliseconds() -> None:
    answer = await ask("/embed", {"inputs": ["deep learning", [4, 5, 6]]})
    times = ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")
    assert [answer.headers[name].isdigit() for name in times] == [True] * 5


EMBED = Pooling(task="embed", activation=True, cut="right")
UNSCALED = replace(EMBED, activation=False)
CLASSES = Pooling(task="classify", activation=False, cut="right")
TEXTS = {"query": "deep", "texts": ["learning", "fun"]}


@pytest.mark.parametrize(
    ("path", "kind", "document", "requests"),
    [
        ("/embed", "embedding", {"inputs": "deep", "dimensions": None}, [("deep", EMBED)]),
        ("/embed", "embedding", {"inputs": "deep", "normalize": False}, [("deep", UNSCALED)]),
        ("/embed", "embedding", {"inputs": "deep", "dimensions": 3}, [("deep", UNSCALED)]),
        ("/embed_all", "embedding", {"inputs": "deep"}, [("deep", replace(UNSCALED, task="token_embed"))]),
        ("/embed_sparse", "sparse", {"inputs": ["deep", "日本"]}, [("deep", UNSCALED), ("日本", UNSCALED)]),
        ("/rerank", "reranker", TEXTS, [("deep", replace(CLASSES, second=text)) for text in TEXTS["texts"]]),
        ("/predict", "classifier", {"inputs": "fun"}, [("fun", CLASSES)]),
        ("/predict", "classifier", {"inputs": ["deep", "fun"]}, [("deep", replace(CLASSES, second="fun"))]),
        (
            "/predict",
            "classifier",
            {"inputs": [["fun"], ["a", "b"]]},
            [("fun", CLASSES), ("a", replace(CLASSES, second="b"))],
        ),
    ],
)
async def test_each_text_or_pair_is_a_request(path: str, kind: Kind, document: Any, requests: Any) -> None:
    answer = await ask(path, document, kind, [(1, 2, 3)] if kind == "classifier" else [(1,)])
    assert [(request.prompt, request.pooling) for request in answer.seen] == requests


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


async def test_parameters_of_similarity_hold_for_all_sentences() -> None:
    parameters = {"truncate": True, "truncation_direction": "Left", "prompt_name": "query"}
    document = {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": parameters}
    answer = await ask("/similarity", document, auto_truncate=False)
    assert answer.prompts == ["query : a", "query : b"]
    assert [request.pooling.cut for request in answer.seen if request.pooling] == ["left", "left"]
