"""TEI's routes: bodies of every kind, SageMaker's attribute `route`, and times in headers. `requests/tei.yaml` has the
refusals.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.request import TokenDelta
from handlers.tei.answer import Vectors
from tests.contracts.exchange import JSON
from tests.contracts.test_cases import exchanged

PATHS = ("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/", "/tokenize", "/rerank")
NUMBERS: dict[str, Any] = {"reranker": [(1,)], "classifier": [(1, 2, 3)]}
FIELDS = (
    *("inputs", "query", "texts", "truncate", "truncation_direction", "prompt_name", "normalize", "dimensions", "ids"),
    *("raw_scores", "return_text", "parameters", "add_special_tokens"),
)
TEXTS = st.text(max_size=5) | st.lists(st.text(max_size=5) | st.lists(st.integers(0, 20), max_size=3), max_size=3)


async def ask(tmp_path_factory: pytest.TempPathFactory, kind: str, **request: Any) -> dict[str, Any]:
    numbers = NUMBERS.get(kind, [(0.5, 0.5, 0.5, 0.5)])
    return await exchanged({"model": kind, "numbers": numbers, "request": request}, tmp_path_factory.mktemp("model"))


@given(
    path=st.sampled_from([*PATHS, "/invocations"]),
    kind=st.sampled_from(["embedding", "sparse", "reranker", "classifier", "generating"]),
    document=st.dictionaries(st.sampled_from(FIELDS), JSON | TEXTS, max_size=5),
)
async def test_any_body_gets_an_answer_or_a_refusal_of_the_client(
    tmp_path_factory: pytest.TempPathFactory, path: str, kind: str, document: dict[str, Any]
) -> None:
    headers = {"content-type": "application/json"}
    answer = await ask(tmp_path_factory, kind, path=path, headers=headers, body=json.dumps(document))
    assert answer["status"] in (200, 400, 422, 424, 501)
    assert "internal" not in answer["body"]


async def test_many_ids_are_decoded_as_few_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    answer = await ask(tmp_path_factory, "embedding", path="/decode", body={"ids": [2, *[4] * 5000, 3]})
    assert json.loads(answer["body"]) == [" ".join(["deep"] * 5000)]


@pytest.mark.parametrize(
    ("path", "document", "kind"),
    [
        ("/tokenize", {"inputs": "deep"}, "embedding"),
        ("/tokenize", {"inputs": "deep"}, "generating"),
        ("/", {"inputs": "deep"}, "embedding"),
        ("/rerank", {"query": "a", "texts": ["b"]}, "reranker"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "reranker"),
        ("/embed", {"inputs": "deep"}, "generating"),
    ],
)
async def test_sagemakers_attribute_reaches_the_route_of_the_models_kind(
    tmp_path_factory: pytest.TempPathFactory, path: str, document: dict[str, Any], kind: str
) -> None:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": f"route={path}"}
    direct = await ask(tmp_path_factory, kind, path=path, body=document)
    through = await ask(tmp_path_factory, kind, path="/invocations", headers=headers, body=document)
    assert (through["status"], through["body"]) == (direct["status"], direct["body"])


def test_headers_have_the_means_of_the_texts_times_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    answer = Vectors(2, 16)
    now = 102.0
    for prompt, (submitted_at, queued) in enumerate([(100.25, 0.125), (100.75, 0.25)]):
        numbers = np.array([0.5], np.float32)
        answer.feed(
            prompt, TokenDelta("", last=True, numbers=numbers, submitted_at=submitted_at, queued_seconds=queued)
        )
    headers = dict(answer.headers)
    names = ("compute", "total", "tokenization", "queue", "inference")
    assert [headers[f"x-{name}-time"] for name in names] == ["2000", "2000", "500", "187", "1312"]
