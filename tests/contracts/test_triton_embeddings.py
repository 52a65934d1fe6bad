"""Vectors by Triton's generate extension (`embedding_request`) and by KServe's `/infer`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.pooling import Pooling
from tests.contracts.pooling_exchange import Kind, ask

pytestmark = pytest.mark.asyncio
MODEL = "/v2/models/model"
UNIT = [(0.6, 0.0, 0.0, 0.8)]


def wanting(**embedding: Any) -> dict[str, Any]:
    return {"text_input": "unused", "embedding_request": json.dumps(embedding)}


def tensor(*texts: Any, **changes: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "input_text", "shape": [len(texts)], "datatype": "BYTES", "data": texts} | changes]}


def error(message: str) -> bytes:
    return json.dumps({"error": message}, separators=(",", ":")).encode()


async def test_the_vector_is_a_json_text_of_the_numbers_in_doubles() -> None:
    answer = await ask(f"{MODEL}/generate", wanting(input="deep learning"), numbers=[(0.1, -2, 0, 1)])
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.body == (
        b'{"model_name":"model","model_version":"1","text_output":"[0.10000000149011612, -2.0, 0.0, 1.0]"}'
    )
    assert answer.prompts == ["deep learning"]
    assert answer.seen[0].pooling == Pooling(task="embed")


async def test_it_has_the_id_and_the_counts_that_were_asked_for() -> None:
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    document = {"id": "7", **wanting(input="deep"), **counts}
    answer = await ask(f"{MODEL}/versions/1/generate", document, numbers=UNIT)
    assert answer.body.startswith(
        b'{"id":"7","model_name":"model","model_version":"1","num_input_tokens":3,"num_output_tokens":0,"text_output":'
    )


async def test_a_stream_has_one_event() -> None:
    answer = await ask(f"{MODEL}/generate_stream", wanting(input="deep"), numbers=[(1, 0, 0, 0)])
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.body == (b'data: {"model_name":"model","model_version":"1","text_output":"[1.0, 0.0, 0.0, 0.0]"}\n\n')


@pytest.mark.parametrize(
    ("vector", "dimensions", "numbers"),
    [((0.6, 0, 0, 0.8), 2, [1.0, 0.0]), ((3, 4, 0, 0), 1, [3.0]), ((0, 0, 0.6, 0.8), 2, [0.0, 0.0])],
)
async def test_a_vector_of_length_1_keeps_it_when_it_is_cut(vector: Any, dimensions: int, numbers: list[float]) -> None:
    document = wanting(input="deep", pooling_params={"dimensions": [dimensions]})
    answer = await ask(f"{MODEL}/generate", document, numbers=[vector])
    assert json.loads(json.loads(answer.body)["text_output"]) == numbers


@pytest.mark.parametrize(
    ("kind", "document", "message"),
    [
        ("embedding", {"text_input": "a"}, "Error generating stream: Model model does not support 'generate' request"),
        ("reranker", wanting(input="a"), "Error generating stream: Model model does not support 'embed' request"),
        ("generating", wanting(input="a"), "Error generating stream: Model model does not support 'embed' request"),
        (
            "embedding",
            {"embedding_request": "{}"},
            "[request id: <id_unknown>] expected number of inputs between 1 and 11 but got 1 inputs for model 'model'. "
            "Got input(s) ['embedding_request'], but missing required input(s) ['text_input']. Please provide all "
            "required input(s).",
        ),
        (
            "embedding",
            wanting(),
            "Error generating stream: `embedding_request` must be a JSON object in a string: Object missing required "
            "field `input`",
        ),
        (
            "embedding",
            wanting(input=["a"]),
            "Error generating stream: `embedding_request` must be a JSON object in a string: Expected `int`, got `str` "
            "- at `$.input[0]`",
        ),
        (
            "embedding",
            wanting(input="a", pooling_params={"dimensions": [5]}),
            "Error generating stream: `dimensions` must be at most 4, got 5",
        ),
    ],
)
async def test_other_requests_are_400_in_tritons_words(kind: Kind, document: dict[str, Any], message: str) -> None:
    for route in ("generate", "generate_stream"):
        answer = await ask(f"{MODEL}/{route}", document, kind)
        assert (answer.status, answer.body) == (400, error(message))
        assert answer.seen == []


async def test_texts_of_a_tensor_become_the_rows_of_a_tensor() -> None:
    vectors = [(0.1, 0, 0, 0), (0, 1, 0, 0)]
    body = (
        b'{"model_name":"model","model_version":"1","outputs":[{"name":"embedding","datatype":"FP32","shape":[2,4],'
        b'"data":[0.10000000149011612,0.0,0.0,0.0,0.0,1.0,0.0,0.0]}]}'
    )
    for path in (f"{MODEL}/infer", f"{MODEL}/versions/1/infer"):
        answer = await ask(path, tensor("deep", "fun"), numbers=vectors)
        assert (answer.status, answer.body) == (200, body)
    assert answer.prompts == ["deep", "fun"]
    nested = await ask(f"{MODEL}/infer", {"id": "7", **tensor(["deep"], ["fun"], shape=[2, 1])}, numbers=vectors)
    assert nested.body == body.replace(b'{"model_name"', b'{"id":"7","model_name"', 1)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "failed to parse the request JSON buffer: Object missing required field `inputs`"),
        ({"inputs": []}, "expected the input ['input_text'], got []"),
        (tensor("a", name="text"), "expected the input ['input_text'], got ['text']"),
        (tensor(1), "input 'input_text' must hold at least one text, and texts only"),
        (tensor(), "input 'input_text' must hold at least one text, and texts only"),
        (tensor("a", datatype="FP32"), "input 'input_text' must have the datatype BYTES, got FP32"),
        (tensor("a", shape=[2]), "input 'input_text' has 1 texts, and the shape [2]"),
    ],
)
async def test_a_wrong_tensor_is_400(document: dict[str, Any], message: str) -> None:
    answer = await ask(f"{MODEL}/infer", document)
    assert (answer.status, answer.body) == (400, error(message))


async def test_a_binary_tensor_is_400() -> None:
    headers = {"Inference-Header-Content-Length": "10", "content-type": "application/octet-stream"}
    answer = await ask(f"{MODEL}/infer", content=b"{}", headers=headers)
    assert answer.body == error("tensors in binary form are not served: send `data` as JSON")


@pytest.mark.parametrize("kind", ["reranker", "generating"])
async def test_tensors_are_for_embedding_models(kind: Kind) -> None:
    answer = await ask(f"{MODEL}/infer", tensor("a"), kind)
    if kind == "generating":
        assert (answer.status, answer.body.startswith(b'{"error":"/infer is not served')) == (501, True)
        return
    message = "Error generating stream: Model model does not support 'embed' request"
    assert (answer.status, answer.body) == (400, error(message))


async def test_an_unknown_model_is_404() -> None:
    answer = await ask("/v2/models/other/infer", tensor("a"))
    assert (answer.status, answer.body) == (404, error("Request for unknown model: 'other' is not found"))
