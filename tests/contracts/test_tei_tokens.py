"""TEI's routes /tokenize, /decode, /info and /health, and the same paths of models that generate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from container.models.life_cycle import State
from tests.contracts.pooling_exchange import Kind, ask


async def test_many_ids_are_decoded_as_few_are() -> None:
    answer = await ask("/decode", {"ids": [2, *[4] * 5000, 3]})
    assert json.loads(answer.body) == [" ".join(["deep"] * 5000)]


async def test_info_of_a_model_that_generates_is_tgis() -> None:
    assert b'"model_pipeline_tag":"text-generation"' in (await ask("/info", kind="generating")).body


@pytest.mark.parametrize("path", ["/", "/health"])
async def test_health_is_503_with_the_error_of_the_kind_of_model(path: str) -> None:
    for kind, error_type in (("embedding", "Unhealthy"), ("generating", "healthcheck")):
        ill = await ask(path, kind=kind, state=State.DRAINING)
        assert ill.status == 503
        assert json.loads(ill.body) == {"error": "unhealthy", "error_type": error_type}


async def test_a_model_that_loads_has_no_kind_yet() -> None:
    ill = await ask("/health", state=State.STARTING)
    assert (ill.status, ill.body) == (503, b'{"error":"unhealthy","error_type":"healthcheck"}')


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
    path: str, document: dict[str, Any], kind: Kind
) -> None:
    direct = await ask(path, document, kind)
    headers = {"X-Amzn-SageMaker-Custom-Attributes": f"route={path}"}
    through = await ask("/invocations", document, kind, headers=headers)
    assert (through.status, through.body) == (direct.status, direct.body)
