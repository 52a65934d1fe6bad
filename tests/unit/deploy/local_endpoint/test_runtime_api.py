"""The runtime API over real sockets: headers in both directions, AWS's errors, limits, and incomplete replies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from botocore.eventstream import EventStreamBuffer

from deploy.local_endpoint import runtime_api
from tests.unit.deploy.local_endpoint.local_endpoint import (
    Script,
    ScriptedContainer,
    Seen,
    Send,
    answering,
    broken_after,
    local_endpoint,
    piece,
    silent,
    start,
)
from tests.waiting import pass_time, until

INVOKE, STREAM = (f"/endpoints/e/{name}" for name in ("invocations", "invocations-response-stream"))
X = "x-amzn-sagemaker-"


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    assert response.headers["content-type"] == "application/json"
    assert len(response.headers["x-amzn-requestid"]) == 36
    return response.status_code, response.headers["x-amzn-errortype"], response.json()["Message"]


def messages_of(body: bytes) -> list[tuple[str, bytes]]:
    buffer: Any = EventStreamBuffer()
    buffer.add_data(body)
    return [(e.headers.get(":event-type") or e.headers[":exception-type"], e.payload) for e in buffer]


async def test_a_call_reaches_the_container_with_the_headers_of_the_api_alone() -> None:
    container = ScriptedContainer()
    given = {
        "content-type": "application/x-mine",
        "accept": "text/plain",
        "authorization": "AWS4-HMAC-SHA256 secret",
        "x-amz-date": "20260101T000000Z",
        "amz-sdk-request": "attempt=1",
        "x-mine": "dropped",
        f"{X}custom-attributes": "trace=1",
        f"{X}inference-id": "id-1",
        f"{X}session-id": "NEW_SESSION",
        f"{X}target-model": "a.tar.gz",
        f"{X}enable-explanations": "`true`",
        f"{X}target-variant": "AllTraffic",
        f"{X}prefix-aware-id": "p",
    }
    async with local_endpoint(container) as client:
        response = await client.post(INVOKE, content=b"\x00body", headers=given)
    assert (response.status_code, response.content) == (200, b"{}")
    (seen,) = container.seen
    assert (seen.line, seen.body) == ("POST /invocations", b"\x00body")
    assert seen.headers == {
        "content-type": "application/x-mine",
        "accept": "text/plain",
        f"{X}forwarded-api": "InvokeEndpoint",
        f"{X}custom-attributes": "trace=1",
        f"{X}inference-id": "id-1",
        f"{X}session-id": "NEW_SESSION",
        f"{X}target-model": "a.tar.gz",
    }


async def test_accept_of_a_stream_travels_in_a_header_of_its_own() -> None:
    container = ScriptedContainer()
    async with local_endpoint(container) as client:
        headers = {f"{X}accept": "application/jsonlines", "accept": "*/*"}
        response = await client.post(STREAM, content=b"x", headers=headers)
    assert response.headers["content-type"] == "application/vnd.amazon.eventstream"
    assert response.headers[f"{X}content-type"] == "application/json"
    assert messages_of(response.content) == [("PayloadPart", b"{}")]
    assert container.seen[0].headers["accept"] == "application/jsonlines"
    assert container.seen[0].headers[f"{X}forwarded-api"] == "InvokeEndpointWithResponseStream"


END = "; Expires=2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("sent", "session"),
    [
        ({"session-id": f"a-1{END}"}, f"a-1{END}"),
        ({"session-id": f"a-1{END}", "new-session-id": f"b-2{END}"}, f"b-2{END}"),
        ({"session-id": "a-1"}, None),
    ],
)
async def test_a_new_session_is_shown_in_the_standards_header_whoever_made_it(
    sent: dict[str, str], session: str | None
) -> None:
    sent = {f"{X}{name}": value for name, value in sent.items()}
    sent |= {f"{X}custom-attributes": "k=v", f"{X}closed-session-id": "c", "X-Own": "1"}
    async with local_endpoint(ScriptedContainer(answering(200, b"{}", *sent.items()))) as client:
        response = await client.post(INVOKE, content=b"{}")
    assert response.headers.get(f"{X}new-session-id") == session
    assert response.headers[f"{X}closed-session-id"] == "c"
    assert response.headers[f"{X}custom-attributes"] == "k=v"
    assert response.headers["x-amzn-invoked-production-variant"] == "AllTraffic"
    assert f"{X}session-id" not in response.headers
    assert "x-own" not in response.headers


@pytest.mark.parametrize("path", [INVOKE, STREAM])
@pytest.mark.parametrize(
    ("status", "side", "code"),
    [
        (400, "client", "CLIENT_ERROR_FROM_MODEL"),
        (503, "server", "INTERNAL_FAILURE_FROM_MODEL"),
        (307, "server", "INTERNAL_FAILURE_FROM_MODEL"),
    ],
)
async def test_a_containers_error_is_a_model_error(path: str, status: int, side: str, code: str) -> None:
    async with local_endpoint(ScriptedContainer(answering(status, "no ü".encode()))) as client:
        response = await client.post(path, content=b"{}")
    found = error_of(response)
    assert found[:2] == (424, "ModelError")
    message = f'Received {side} error ({status}) from primary with message "no ü". See https://'
    assert found[2].startswith(message)
    assert found[2].endswith("/aws/sagemaker/Endpoints/e in account 000000000000 for more information.")
    body = response.json()
    assert (body["OriginalStatusCode"], body["OriginalMessage"], body["ErrorCode"]) == (status, "no ü", code)
    assert body["LogStreamArn"] == "arn:aws:logs:us-east-1:000000000000:log-group:/aws/sagemaker/Endpoints/e"


async def test_a_huge_error_is_not_shown() -> None:
    async with local_endpoint(ScriptedContainer(answering(500, b"x" * 70_000))) as client:
        response = await client.post(INVOKE, content=b"{}")
    assert "and could not load the entire response body." in response.json()["Message"]
    assert response.json()["OriginalStatusCode"] == 500


@pytest.mark.parametrize(
    ("path", "headers", "message"),
    [
        ("/endpoints/nope/invocations", {}, "Endpoint nope of account 000000000000 not found."),
        ("/endpoints/a_b/invocations", {}, "1 validation error detected: Value 'a_b' at 'endpointName' failed"),
        (f"/endpoints/{'a' * 64}/invocations", {}, "Member must have length less than or equal to 63"),
        (STREAM, {f"{X}session-id": "NEW_SESSION"}, "Value 'NEW_SESSION' at 'sessionId' failed to satisfy"),
        (INVOKE, {f"{X}session-id": "a b"}, "Value 'a b' at 'sessionId' failed to satisfy"),
        (INVOKE, {f"{X}custom-attributes": "x" * 1025}, "at 'customAttributes' failed to satisfy constraint: Member"),
        (INVOKE, {f"{X}inference-id": "x" * 65}, "at 'inferenceId' failed to satisfy constraint: Member must have"),
        (INVOKE, {f"{X}target-variant": "Other"}, "Variant Other of endpoint e not found"),
        (INVOKE, {f"{X}target-container-hostname": "c"}, "TargetContainerHostname c: endpoint e has one container"),
        (INVOKE, {f"{X}target-model": "x" * 1025}, "at 'targetModel' failed to satisfy constraint: Member must have"),
        (INVOKE, {f"{X}inference-component": "ic"}, "Inference component ic of account 000000000000 not found."),
    ],
)
async def test_a_wrong_call_is_a_validation_error(path: str, headers: dict[str, str], message: str) -> None:
    container = ScriptedContainer()
    async with local_endpoint(container) as client:
        status, name, text = error_of(await client.post(path, content=b"{}", headers=headers))
    assert (status, name) == (400, "ValidationError")
    assert message in text
    assert container.seen == []


@pytest.mark.parametrize(
    ("method", "path"), [("GET", INVOKE), ("GET", "/endpoints/e/async-invocations"), ("POST", "/endpoints/e")]
)
async def test_what_the_api_does_not_have_is_404(method: str, path: str) -> None:
    async with local_endpoint(ScriptedContainer(answering(404, b"container"))) as client:
        response = await client.request(method, path)
    assert error_of(response)[:2] == (404, "UnknownOperationException")


async def test_inference_components_are_the_base_model_or_an_adapter() -> None:
    container = ScriptedContainer()
    header = f"{X}inference-component"
    async with local_endpoint(container, components=frozenset({"base"}), adapters=frozenset({"fr"})) as client:
        assert (await client.post(INVOKE, content=b"{}", headers={header: "base"})).status_code == 200
        assert (await client.post(STREAM, content=b"{}", headers={header: "fr"})).status_code == 200
        missing = await client.post(INVOKE, content=b"{}")
    assert [seen.headers.get(f"{X}adapter-identifier") for seen in container.seen] == [None, "fr"]
    assert header not in container.seen[0].headers
    assert missing.json()["ErrorCode"] == "INFERENCE_COMPONENT_NAME_MISSING"


async def test_payloads_have_a_limit_both_ways() -> None:
    container = ScriptedContainer(answering(200, b"x" * 2000))
    async with local_endpoint(container, max_payload=1000) as client:
        assert error_of(await client.post(INVOKE, content=b"x" * 1001)) == (
            413,
            "ValidationError",
            "HTTP content length exceeded 1000 bytes.",
        )

        async def pieces() -> Any:
            for _ in range(11):
                yield b"x" * 100

        assert (await client.post(INVOKE, content=pieces())).status_code == 413
        assert container.seen == []
        answered = await client.post(INVOKE, content=b"x" * 1000)
        assert (answered.status_code, answered.json()["OriginalStatusCode"]) == (424, 200)
        assert len(messages_of((await client.post(STREAM, content=b"x")).content)[0][1]) == 2000


async def test_a_payload_that_does_not_go_on_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_api, "READ_SECONDS", 0.1)
    container = ScriptedContainer()
    async with local_endpoint(container) as client:
        url = client.base_url
        for path in (INVOKE, STREAM):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc".encode())
            reply = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            assert reply.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in reply
            assert b"nothing of the body's rest has come for 0.1 s" in reply
    assert container.seen == []


@pytest.mark.parametrize("path", [INVOKE, STREAM, "/endpoints/e/openai/v1/chat/completions"])
async def test_a_client_that_leaves_ends_the_containers_call_at_once(path: str) -> None:
    container = ScriptedContainer(silent)
    async with local_endpoint(container) as client:
        call = asyncio.create_task(client.post(path, content=b"{}"))
        await until(lambda: container.seen)
        call.cancel()
        await until(lambda: container.ended)


async def test_what_is_escaped_in_a_path_stays_escaped() -> None:
    container = ScriptedContainer()
    async with local_endpoint(container) as client:
        for path in ("models/org%2Fmodel", "models/a%3Fb%20c"):
            assert (await client.get(f"/endpoints/e/openai/v1/{path}")).status_code == 200
        encoded = await client.get("/endpoints/e/openai%2Fv1%2Fmodels")
        assert encoded.headers["x-amzn-errortype"] == "UnknownOperationException"
    lines = [seen.line for seen in container.seen]
    assert lines == [f"GET /v1/models/{name}" for name in ("org%2Fmodel", "a%3Fb%20c")]


async def test_a_fault_of_ours_is_an_internal_failure_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("deploy.local_endpoint.runtime_api.read_parameters", faulty)
    async with local_endpoint(ScriptedContainer()) as client:
        response = await client.post(INVOKE, content=b"{}")
    assert error_of(response)[:2] == (500, "InternalFailure")
    assert "secret" not in response.text


@pytest.mark.parametrize("ping", [503, 207])
async def test_a_model_that_is_loading_is_not_ready_and_an_overloaded_one_is(ping: int) -> None:
    container = ScriptedContainer(answering(503), ping)
    async with local_endpoint(container) as client:
        for path in (INVOKE, STREAM):
            assert error_of(await client.post(path, content=b"{}"))[:2] == (429, "ModelNotReadyException")
        container.ping = 200
        response = await client.post(INVOKE, content=b"{}")
    assert (error_of(response)[:2], response.json()["OriginalStatusCode"]) == ((424, "ModelError"), 503)


async def test_a_container_whose_ping_hangs_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.local_endpoint.invocation._PING_SECONDS", 0.1)
    async with local_endpoint(ScriptedContainer(answering(503), ping=0)) as client:
        assert error_of(await client.post(INVOKE, content=b"{}"))[:2] == (429, "ModelNotReadyException")


async def headers_alone(seen: Seen, send: Send) -> None:
    await start(send)
    await silent(seen, send)


async def nothing(seen: Seen, send: Send) -> None:
    pass


async def headers_and_no_more(seen: Seen, send: Send) -> None:
    await start(send)


@pytest.mark.parametrize("path", [INVOKE, STREAM])
@pytest.mark.parametrize(
    ("script", "message"),
    [
        *((script, "Your invocation timed out while waiting for a response") for script in (silent, headers_alone)),
        *((script, "could not get a response from the e endpoint") for script in (nothing, headers_and_no_more)),
    ],
)
async def test_a_container_without_an_answer_in_time_is_a_model_error(path: str, script: Script, message: str) -> None:
    container = ScriptedContainer(script)
    async with local_endpoint(container, answer_timeout=60.0) as client:
        asking = asyncio.create_task(client.post(path, content=b"{}"))
        await until(lambda: container.seen)
        if script in (silent, headers_alone):
            await pass_time(61)
        response = await asking
    assert error_of(response)[:2] == (424, "ModelError")
    assert message in response.text
    assert response.json()["OriginalStatusCode"] == 0
    assert container.ended == 1


async def test_a_stream_that_breaks_off_ends_with_stream_broken() -> None:
    async with local_endpoint(ScriptedContainer(broken_after(b"one\n"))) as client:
        (first, failure) = messages_of((await client.post(STREAM, content=b"{}")).content)
    assert first == ("PayloadPart", b"one\n")
    assert failure[0] == "ModelStreamError"
    assert json.loads(failure[1])["ErrorCode"] == "StreamBroken"


async def test_a_stream_comes_piece_by_piece() -> None:
    first_is_there = asyncio.Event()

    async def two_pieces(seen: Seen, send: Send) -> None:
        await start(send)
        await piece(send, b"one\n")
        await first_is_there.wait()
        await piece(send, b"two\n", last=True)

    body = b""
    async with (
        local_endpoint(ScriptedContainer(two_pieces)) as client,
        client.stream("POST", STREAM, content=b"{}") as response,
    ):
        async for data in response.aiter_raw():
            body += data
            first_is_there.set()
    assert messages_of(body) == [("PayloadPart", b"one\n"), ("PayloadPart", b"two\n")]


async def test_a_stream_that_takes_too_long_ends_with_time_exceeded() -> None:
    sent = 0

    async def endless(seen: Seen, send: Send) -> None:
        nonlocal sent
        await start(send)
        while True:
            await piece(send, b"x")
            sent += 1
            await asyncio.sleep(0.01)

    container = ScriptedContainer(endless)
    async with local_endpoint(container, stream_timeout=60.0) as client:
        asking = asyncio.create_task(client.post(STREAM, content=b"{}"))
        await until(lambda: sent > 3)
        await pass_time(61)
        *pieces, failure = messages_of((await asking).content)
    assert pieces
    assert json.loads(failure[1])["ErrorCode"] == "ModelInvocationTimeExceeded"
    assert container.ended == 1


async def test_a_client_that_does_not_read_holds_the_container_back_until_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploy.local_endpoint.invocation._LAST_MESSAGE_SECONDS", 0.2)
    written = 0

    async def flood(seen: Seen, send: Send) -> None:
        nonlocal written
        await start(send)
        while True:
            await piece(send, b"x" * 65536)
            written += 65536
            await asyncio.sleep(0)  # The event loop sends the bytes at the end of its turn.

    container = ScriptedContainer(flood)
    async with (
        local_endpoint(container, stream_timeout=60.0) as client,
        client.stream("POST", STREAM, content=b"{}") as response,
    ):
        pieces = response.aiter_raw()
        await anext(pieces)
        for _ in range(1000):  # Without a limit, the container would write 64 MB.
            await asyncio.sleep(0)
        assert written < 16 * 1024 * 1024
        await pass_time(61)
        await until(lambda: container.ended)
        await asyncio.sleep(0.5)  # This is longer than the last message may wait.
        with pytest.raises(
            httpx.TransportError
        ):  # The client did not read the last message in time, and its connection is dropped.
            _ = [part async for part in pieces]
