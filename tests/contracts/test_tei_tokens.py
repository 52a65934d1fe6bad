"""TEI's routes /tokenize, /decode, /info and /health, and the same paths of models that generate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from container.models.life_cycle import State
from tests.contracts.pooling_exchange import Kind, ask

pytestmark = pytest.mark.asyncio
CLS = '{"id":2,"text":"[CLS]","special":true,"start":null,"stop":null}'
SEP = '{"id":3,"text":"[SEP]","special":true,"start":null,"stop":null}'
DEEP = '{"id":4,"text":"deep","special":false,"start":0,"stop":4}'


@pytest.mark.parametrize(
    ("document", "body"),
    [
        ({"inputs": "deep"}, f"[[{CLS},{DEEP},{SEP}]]"),
        ({"inputs": ["deep"]}, f"[[{CLS},{DEEP},{SEP}]]"),
        ({"inputs": ["deep", "deep"], "add_special_tokens": False}, f"[[{DEEP}],[{DEEP}]]"),
        (
            {"inputs": "schön 日本 fun", "add_special_tokens": False},
            '[[{"id":8,"text":"schön","special":false,"start":0,"stop":6},'
            '{"id":11,"text":"日本","special":false,"start":7,"stop":13},'
            '{"id":7,"text":"fun","special":false,"start":14,"stop":17}]]',
        ),
        (
            {"inputs": "[SEP]", "add_special_tokens": False},
            '[[{"id":3,"text":"[SEP]","special":false,"start":0,"stop":5}]]',
        ),
        (
            {"inputs": "deep", "add_special_tokens": False, "prompt_name": "query"},
            '[[{"id":9,"text":"query","special":false,"start":0,"stop":5},'
            '{"id":10,"text":":","special":false,"start":6,"stop":7},'
            '{"id":4,"text":"deep","special":false,"start":8,"stop":12}]]',
        ),
    ],
)
async def test_tokens_have_their_bytes_in_the_text(document: dict[str, Any], body: str) -> None:
    answer = await ask("/tokenize", document)
    assert (answer.status, answer.body.decode()) == (200, body)
    assert "x-compute-time" not in answer.headers


@pytest.mark.parametrize("kind", ["sparse", "reranker", "classifier"])
async def test_all_kinds_of_pooling_models_tokenize_as_tei_does(kind: Kind) -> None:
    assert (await ask("/tokenize", {"inputs": "deep"}, kind)).body.decode() == f"[[{CLS},{DEEP},{SEP}]]"


async def test_a_model_that_generates_tokenizes_as_tgi_does() -> None:
    answer = await ask("/tokenize", {"inputs": "deep"}, "generating")
    assert answer.body == (
        b'[{"id":2,"text":"","start":0,"stop":0},{"id":4,"text":"deep","start":0,"stop":4},'
        b'{"id":3,"text":"","start":0,"stop":0}]'
    )


async def test_a_body_with_a_prompt_is_vllms() -> None:
    answer = await ask("/tokenize", {"prompt": "deep"})
    assert answer.status == 501
    assert b"this needs the vLLM engine" in answer.body


@pytest.mark.parametrize(
    ("document", "body"),
    [
        ({"ids": [2, 4, 5, 3]}, b'["deep learning"]'),
        ({"ids": [[2, 4, 5, 3]]}, b'["deep learning"]'),
        ({"ids": [[4], [8, 11]], "skip_special_tokens": False}, '["deep","schön 日本"]'.encode()),
        ({"ids": [2, 4, 3], "skip_special_tokens": False}, b'["[CLS] deep [SEP]"]'),
        ({"ids": [4, 4_000_000_000]}, b'["deep"]'),  # Unknown ids have no text, as in TEI.
    ],
)
@pytest.mark.parametrize("kind", ["embedding", "generating"])
async def test_ids_become_texts(document: dict[str, Any], body: bytes, kind: Kind) -> None:
    answer = await ask("/decode", document, kind)
    assert (answer.status, answer.body) == (200, body)


async def test_many_ids_are_decoded_as_few_are() -> None:
    answer = await ask("/decode", {"ids": [2, *[4] * 5000, 3]})
    assert json.loads(answer.body) == [" ".join(["deep"] * 5000)]


INFO = (
    b'{"model_id":"org/model","model_sha":"abc","model_dtype":"%b","served_model_name":"model","model_type":%b,'
    b'"max_concurrent_requests":100,"max_input_length":8,"max_batch_tokens":16384,"max_batch_requests":null,'
    b'"max_client_batch_size":32,"auto_truncate":true,"tokenization_workers":1,"version":"1.9.3","sha":null,'
    b'"docker_label":null}'
)


@pytest.mark.parametrize(
    ("kind", "dtype", "model_type"),
    [
        ("embedding", b"float32", b'{"embedding":{"pooling":"mean"}}'),
        ("sparse", b"float32", b'{"embedding":{"pooling":"splade"}}'),
        ("reranker", b"float16", b'{"reranker":{"id2label":{"0":"LABEL_0"},"label2id":{"LABEL_0":0}}}'),
        (
            "classifier",
            b"float16",
            b'{"classifier":{"id2label":{"0":"sad","1":"so-so","2":"joy"},"label2id":{"sad":0,"so-so":1,"joy":2}}}',
        ),
    ],
)
async def test_info_tells_the_kind_and_the_limits(kind: Kind, dtype: bytes, model_type: bytes) -> None:
    answer = await ask("/info", kind=kind)
    assert (answer.status, answer.body) == (200, INFO % (dtype, model_type))


async def test_info_shows_the_settings() -> None:
    settings = {"max_client_batch_size": 4, "auto_truncate": False, "max_prompt_tokens": 5}
    told = json.loads((await ask("/info", **settings)).body)
    assert (told["max_client_batch_size"], told["auto_truncate"], told["max_input_length"]) == (4, False, 5)


async def test_info_of_a_model_that_generates_is_tgis() -> None:
    assert b'"model_pipeline_tag":"text-generation"' in (await ask("/info", kind="generating")).body


@pytest.mark.parametrize("path", ["/", "/health"])
async def test_health_is_200_without_a_body_or_503_by_the_kind_of_model(path: str) -> None:
    well = await ask(path)
    assert (well.status, well.body) == (200, b"")
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
