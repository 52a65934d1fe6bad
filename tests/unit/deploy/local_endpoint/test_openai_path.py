"""The OpenAI path of endpoints and of inference components. The container's replies are scripted."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from container.http.cross_site import KnownHosts
from deploy.local_endpoint.remote_container import RemoteContainer
from tests.unit.deploy.local_endpoint.local_endpoint import (
    ScriptedContainer,
    answering,
    broken_after,
    local_endpoint,
    silent,
)

CHAT = "/endpoints/e/openai/v1/chat/completions"
OF_COMPONENT = "/endpoints/e/inference-components/{}/openai/v1/chat/completions"
ADAPTER = "x-amzn-sagemaker-adapter-identifier"
COMPONENTS: dict[str, Any] = {"components": frozenset({"base"}), "adapters": frozenset({"fr"})}


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["type"], error["code"]


async def test_the_container_gets_the_path_without_openai_and_everything_but_the_token() -> None:
    container = ScriptedContainer(answering(201, b"made", ("X-Own", "1")))
    headers = [(b"authorization", b"Bearer sagemaker-api-key-x"), (b"x-mine", "Zoë".encode())]
    headers += [(ADAPTER.encode(), b"other")]
    async with local_endpoint(container) as client:
        response = await client.post(f"{CHAT}?x=1", content=b"{}", headers=headers)
        await client.post(f"{CHAT}/?x=1", content=b"{}")
    assert (response.status_code, response.content, response.headers["x-own"]) == (201, b"made", "1")
    seen, with_slash = container.seen
    assert with_slash.line == seen.line
    assert (seen.line, seen.body) == ("POST /v1/chat/completions?x=1", b"{}")
    assert seen.headers["x-mine"].encode("latin-1") == "Zoë".encode()
    assert "authorization" not in seen.headers
    assert ADAPTER not in seen.headers


async def test_the_path_names_the_inference_component() -> None:
    container = ScriptedContainer()
    async with local_endpoint(container, **COMPONENTS) as client:
        for name in ("base", "fr"):
            assert (await client.post(OF_COMPONENT.format(name), content=b"{}")).status_code == 200
    assert [seen.line for seen in container.seen] == ["POST /v1/chat/completions"] * 2
    assert [seen.headers.get(ADAPTER) for seen in container.seen] == [None, "fr"]


@pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter", "abort_request", "info", "chatter"])
async def test_the_container_is_not_managed_by_this_path(path: str) -> None:
    container = ScriptedContainer()
    async with local_endpoint(container) as client:
        response = await client.post(f"/endpoints/e/openai/v1/{path}", content=b"{}")
    assert (response.status_code, response.headers["x-amzn-errortype"]) == (404, "UnknownOperationException")
    assert not container.seen


@pytest.mark.parametrize(
    "rest",
    [
        "chat/../../../models",
        "chat/..",
        "chat/./completions",
        "chat/%2e%2e/models",
        "models/..%2f..%2fmodels",
        "models/.",
    ],
)
async def test_a_path_with_dots_reaches_nothing(rest: str) -> None:
    container = ScriptedContainer()
    async with local_endpoint(container) as client:
        target = f"/endpoints/e/openai/v1/{rest}".encode()
        response = await client.post("/", content=b"{}", extensions={"target": target})
    assert (response.status_code, response.headers["x-amzn-errortype"]) == (404, "UnknownOperationException")
    assert not container.seen


@pytest.mark.parametrize(
    ("path", "headers", "message"),
    [
        ("/endpoints/nope/openai/v1/chat/completions", {}, "Endpoint nope of account 000000000000 not found."),
        ("/endpoints/a_b/openai/v1/chat/completions", {}, "Value 'a_b' at 'endpointName' failed"),
        (OF_COMPONENT.format("nope"), {}, "Inference component nope of account 000000000000 not found."),
        (CHAT, {}, "Inference Component Name header is required"),
        (
            OF_COMPONENT.format("base"),
            {"X-Amzn-SageMaker-Inference-Component": "base"},
            "The header X-Amzn-SageMaker-Inference-Component is not supported here.",
        ),
    ],
)
async def test_a_wrong_call_is_an_invalid_request(path: str, headers: dict[str, str], message: str) -> None:
    container = ScriptedContainer()
    async with local_endpoint(container, **COMPONENTS) as client:
        response = await client.post(path, content=b"{}", headers=headers)
    assert error_of(response) == (400, "invalid_request_error", "validation_error")
    assert message in response.json()["error"]["message"]
    assert container.seen == []


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_an_error_of_the_container_keeps_its_status_and_has_its_body_inside(status: int) -> None:
    async with local_endpoint(ScriptedContainer(answering(status, b'{"error": "no"}'))) as client:
        response = await client.post(CHAT, content=b"{}")
    assert error_of(response) == (status, "server_error", "model_error")
    assert f'error ({status}) from primary with message "{{"error": "no"}}".' in response.json()["error"]["message"]


async def test_other_errors_have_openais_form_as_well() -> None:
    container = ScriptedContainer(answering(503), ping=503)
    async with local_endpoint(container, max_payload=10) as client:
        assert error_of(await client.post(CHAT, content=b"{}")) == (429, "server_error", "model_not_ready")
        large = await client.post(CHAT, content=b"x" * 11)
        assert error_of(large) == (413, "invalid_request_error", "validation_error")
        browser = await client.post(CHAT, content=b"{}", headers={"origin": "http://other", "host": "here"})
        assert error_of(browser) == (403, "invalid_request_error", "access_denied")
    async with local_endpoint(ScriptedContainer(silent), stream_timeout=0.2) as client:
        assert error_of(await client.post(CHAT, content=b"{}")) == (424, "server_error", "model_error")


async def test_a_reply_that_breaks_off_has_no_end() -> None:
    async with (
        local_endpoint(ScriptedContainer(broken_after(b"data: 1\n\n"))) as client,
        client.stream("POST", CHAT, content=b"{}") as response,
    ):
        pieces = response.aiter_raw()
        assert await anext(pieces) == b"data: 1\n\n"
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(pieces)


async def test_a_component_whose_container_cannot_be_reached_has_no_capacity() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"  # bound, and nobody listens
        container = RemoteContainer(nobody, KnownHosts())
        async with local_endpoint(container, adapters=frozenset({"fr"})) as client:
            header = {"x-amzn-sagemaker-inference-component": "fr"}
            for path in ("/endpoints/e/invocations", "/endpoints/e/invocations-response-stream"):
                response = await client.post(path, content=b"{}", headers=header)
                assert (response.status_code, response.headers["x-amzn-errortype"]) == (400, "ValidationError")
                assert "has no capacity to process this request" in response.json()["Message"]
                loading = await client.post(path, content=b"{}")
                assert loading.headers["x-amzn-errortype"] == "ModelNotReadyException"
            response = await client.post(OF_COMPONENT.format("fr"), content=b"{}")
            assert error_of(response) == (400, "invalid_request_error", "validation_error")
            assert "has no capacity to process this request" in response.json()["error"]["message"]
        await container.close()
