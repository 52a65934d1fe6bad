"""SageMaker's headers, from the platform to the container and back."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from container.http.request_head import RequestHead
from handlers.custom.handler_reply import response_headers
from handlers.lmi.routes import named_model
from tests.unit.container.one_model import make, ready, with_engine

SERVED = frozenset({"small", "big.tar.gz"})
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


def named(query: bytes = b"", **headers: str) -> str | None:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": "POST", "path": "/", "raw_path": b"/", "query_string": query, "headers": sent}
    return named_model(SERVED, RequestHead(scope))[0]


@pytest.mark.parametrize(
    ("artifact", "model"),
    [
        ("small", "small"),
        ("small.tar.gz", "small"),
        ("models/v2/small.tar.gz", "small"),
        ("big.tar.gz", "big.tar.gz"),
        ("other.tar.gz", None),
        ("", None),
    ],
)
def test_target_model_names_a_model_that_is_served_and_is_ignored_otherwise(artifact: str, model: str | None) -> None:
    assert named(x_amzn_sagemaker_target_model=artifact) == model


def test_a_name_by_lmis_ways_goes_before_target_model() -> None:
    header = {"x_amzn_sagemaker_target_model": "small.tar.gz"}
    assert named(b"model_name=other", **header) == "other"
    assert named(x_amzn_sagemaker_custom_attributes="a=1; model_name=other", **header) == "other"


@pytest.mark.parametrize("value", ["", "trace=7;tenant=a b", "~" * 1024])
def test_custom_attributes_that_sagemaker_takes_are_returned(value: str) -> None:
    assert response_headers(((ATTRIBUTES, value),)) == ("", ((ATTRIBUTES, value),))


@pytest.mark.parametrize("value", ["~" * 1025, "caf\u00e9"])
def test_custom_attributes_that_sagemaker_would_refuse_the_reply_for_are_left_out(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert response_headers(((ATTRIBUTES.lower(), value), ("a", "b"))) == ("", (("a", "b"),))
    assert "at most 1024 visible ASCII characters" in caplog.text


async def identity(headers: dict[str, str], **settings: Any) -> str:
    async with ready(**settings) as client:
        answer: httpx.Response = await client.post("/invocations", content=b"{", headers=headers)
    assert answer.status_code == 424
    return answer.headers["x-request-id"]


async def test_the_inference_id_is_the_requests_id_where_the_configured_header_is_absent() -> None:
    inference = {"X-Amzn-SageMaker-Inference-Id": "inference-7"}
    assert await identity(inference) == "inference-7"
    assert await identity(inference | {"x-request-id": "own"}) == "own"
    assert await identity(inference | {"x-trace": "t"}, request_id_header="X-Trace") == "t"
    sagemaker = await identity(inference, request_id_header="X-Amzn-SageMaker-Inference-Id")
    assert sagemaker == "inference-7"


async def test_a_payload_that_is_too_large_is_an_empty_413_and_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lifecycle, client = make(max_request_size=10)
    with_engine(lifecycle)
    with caplog.at_level(logging.INFO):
        async with client:
            answer = await client.post("/invocations", content=b"x" * 11)
    assert (answer.status_code, answer.content) == (413, b"")
    assert "the body is larger than 10 bytes (max_request_size)" in caplog.text


async def test_errors_on_any_route_count_against_the_error_rates_once_the_model_is_there() -> None:
    lifecycle, client = make(error_rate_any="1/PT1H")
    async with client:
        for _ in range(3):
            await client.post("/invocations", content=b"{")
        with_engine(lifecycle)
        assert (await client.get("/ping")).status_code == 200
        await client.post("/invocations", content=b"{")
        assert (await client.get("/ping")).status_code == 200
        await client.get("/nowhere")
        answer = await client.get("/ping")
    assert answer.status_code == 503
    assert "error_rate_any" in answer.json()["model"]["reason"]


@pytest.mark.parametrize("kind", ["wlm", "server", "model", "any"])
async def test_a_deadline_that_a_client_gives_cannot_fail_the_ping(kind: str) -> None:
    lifecycle, client = make(**{f"error_rate_{kind}": "1/PT1H"})
    with_engine(lifecycle).begun = False
    async with client:
        for _ in range(4):
            headers = {"X-Slipway-Deadline": "0.0001"}
            answer = await client.post("/invocations", json={"inputs": "x"}, headers=headers)
            assert (answer.status_code, answer.headers["x-slipway-deadline"]) == (424, "reached")
        assert (await client.get("/ping")).status_code == 200
