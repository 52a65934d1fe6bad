"""The records of inference requests (`SERVING_CAPTURE`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from container.http.router import Application, Mount
from container.observability import traffic_capture
from container.observability.traffic_capture import RecordFiles, RequestCapture, recorded_headers, recorded_query
from engines.interface import Generation, Sink
from engines.request import FinishReason, GenerationRequest, Token, TokenDelta
from replay.record_formats import read_line
from tests.freed import bytes_in_cycles
from tests.stand_ins.scripted_engine import ScriptedGeneration
from tests.unit.container.one_model import make, with_engine
from tests.waiting import until

BODY = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}


def lines(directory: Path) -> list[dict[str, Any]]:
    found = [line for file in sorted(directory.rglob("*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in found]


async def records(directory: Path, count: int = 1) -> list[dict[str, Any]]:
    """Return the records, which a thread writes."""
    await until(lambda: len(lines(directory)) == count)
    return lines(directory)


def server(directory: Path, mounts: Sequence[Mount] = ()) -> httpx.AsyncClient:
    """Return a client of a server whose engine answers each request with two tokens."""
    lifecycle, client = make(capture=str(directory), mounts=mounts)
    engine = with_engine(lifecycle)

    async def submit(request: GenerationRequest, sink: Sink) -> Generation:
        end = TokenDelta("b", [Token(9, "b", -0.5)], finish_reason=FinishReason.LENGTH, token_count=2, last=True)
        for delta in (TokenDelta("a", [Token(7, "a", -0.5)], token_count=1), end):
            asyncio.get_running_loop().call_soon(sink.on_delta, delta)
        return ScriptedGeneration(request, sink, engine)

    engine.submit = submit
    return client


def captured(directory: Path, application: Application, **files: int) -> RequestCapture:
    """Return an application whose calls are recorded."""
    return RequestCapture(application, lambda _: True, RecordFiles(directory, **files))


def answering(body: bytes, *headers: tuple[bytes, bytes]) -> Application:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})

    return application


SCOPE = {"type": "http", "method": "POST", "path": "/a", "raw_path": b"/a", "query_string": b"", "headers": []}


async def nowhere(_: Any) -> None: ...


async def test_a_record_has_the_request_and_the_whole_answer(tmp_path: Path) -> None:
    client = server(tmp_path)
    headers = {"x-request-id": "id-1", "accept": "*/*", "authorization": "Bearer k", "x-api-key": "k", "cookie": "k"}
    reply = await client.post("/invocations?adapter=&sig=k", json=BODY, headers=headers)
    (record,) = await records(tmp_path)
    assert (record["id"], record["method"], record["path"]) == ("id-1", "POST", "/invocations?adapter=")
    assert json.loads(record["body"]) == BODY
    assert record["headers"].keys() == {"accept", "content-type", "x-request-id"}
    answer = record["answer"]
    assert (answer["status"], answer["body"], answer["complete"]) == (reply.status_code, reply.text, True)
    assert answer["headers"]["content-type"] == reply.headers["content-type"]
    assert 0 <= answer["first_byte_seconds"] <= answer["seconds"]
    found = read_line(json.dumps(record).encode(), "a:1", "/")
    assert found.reply is not None
    assert (found.path, found.reply.body) == ("/invocations?adapter=", reply.content)
    assert found.time is not None


async def test_streams_and_refusals_are_recorded_whole(tmp_path: Path) -> None:
    client = server(tmp_path)
    streamed = await client.post("/invocations", json=BODY | {"stream": True})
    refused = await client.post("/invocations", json={"inputs": 5})
    first, second = await records(tmp_path, 2)
    assert first["answer"]["body"] == streamed.text
    assert len(streamed.text.splitlines()) > 1
    assert (second["answer"]["status"], second["answer"]["body"]) == (424, refused.text)


async def test_bytes_that_are_no_text_are_in_base64(tmp_path: Path) -> None:
    await server(tmp_path).post("/invocations", content=b"\xff\x00")
    (record,) = await records(tmp_path)
    assert record["body_base64"] == "/wA="
    assert "body" not in record


async def test_only_inference_is_recorded_and_the_route_of_an_attribute_stays_an_attribute(tmp_path: Path) -> None:
    client = server(tmp_path)
    for path in ("/ping", "/v1/models", "/metrics", "/models"):
        await client.get(path)
    await client.post("/models")
    attribute = {"x-amzn-sagemaker-custom-attributes": "route=/predictions/model"}
    await client.post("/invocations", json=BODY, headers=attribute)
    (record,) = await records(tmp_path)
    assert record["path"] == "/invocations"
    assert record["headers"] | attribute == record["headers"]


async def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    directory = tmp_path / "captured"
    await server(directory).post("/invocations", json=BODY)
    await records(directory)
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*.jsonl")} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_dir()} == {0o700}


async def test_a_directory_that_cannot_be_written_breaks_no_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"")
    assert (await server(place).post("/invocations", json=BODY)).status_code == 200
    await until(lambda: "is not captured: " in caplog.text)


async def test_a_record_that_memory_has_no_room_for_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = RecordFiles(tmp_path, max_pending=10)
    assert files.take(10)
    assert not files.take(1)
    files.give_back(10)

    capture = RequestCapture(answering(b"more than ten bytes"), lambda _: True, files)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(capture), base_url="http://x") as client:
        assert (await client.post("/a", content=b"123")).text == "more than ten bytes"
        assert "is not captured: too many bytes wait to be written" in caplog.text
        assert files.take(10)  # Nothing stays reserved.
    assert lines(tmp_path) == []


async def test_a_stop_waits_for_records_and_says_how_many_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic_capture, "LAST_SECONDS", 0.01)
    files, go_on = RecordFiles(tmp_path), threading.Event()

    def slow() -> bytes:
        assert go_on.wait(60)
        return b"{}\n"

    for _ in range(3):
        assert files.take(1)
        files.write("call", "", datetime.now(UTC), 1, slow)
    asyncio.get_running_loop().call_later(0.1, go_on.set)
    await files.finish(60)
    assert (len(lines(tmp_path)), caplog.text) == (3, "")
    go_on.clear()
    for _ in range(3):
        assert files.take(1)
        files.write("call", "", datetime.now(UTC), 1, slow)
    await files.finish(0.05)
    assert "3 captured calls are lost" in caplog.text
    assert files.take(1)
    files.write("late", "", datetime.now(UTC), 1, slow)
    assert "call late is not captured: the server has stopped" in caplog.text
    await files.finish(0.05)
    go_on.set()


async def test_what_is_sent_after_a_client_has_left_takes_no_room(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path, max_pending=10)
    senders: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        senders.append(send)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    await RequestCapture(application, lambda _: True, files)({**SCOPE}, nowhere, nowhere)
    await senders[0]({"type": "http.response.body", "body": b"late", "more_body": True})
    assert files.take(10)


async def test_a_reply_that_breaks_off_is_recorded_as_incomplete(tmp_path: Path) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await captured(tmp_path, application)({**SCOPE}, nowhere, nowhere)
    (record,) = await records(tmp_path)
    assert (record["answer"]["complete"], record["answer"]["body"]) == (False, "part")


@pytest.mark.parametrize(
    "name",
    [
        *("authorization", "proxy-authorization", "x-api-key", "api-key", "cookie", "set-cookie", "x-cache-salt"),
        *("x-amz-security-token", "x-goog-api-key", "x-client-secret", "host", "content-length", "x-auth-token"),
        *("x-forwarded-access-token", "x-amzn-oidc-data", "x-amzn-oidc-accesstoken", "hf-token", "x-vault-token"),
        *("ocp-apim-subscription-key", "x-goog-iap-jwt-assertion", "cf-access-jwt-assertion", "x-ms-client-principal"),
        *("x-starting-token", "x-next-token", "x-forwarded-client-cert", "openai-organization", "baggage", "x-mine"),
    ],
)
async def test_no_file_gets_credentials_and_unknown_headers(name: str) -> None:
    assert recorded_headers([(name.encode(), b"x"), (b"accept", b"y")]) == [(b"accept", b"y")]


async def test_no_file_gets_an_unknown_header_of_a_reply(tmp_path: Path) -> None:
    headers = [(b"content-type", b"text/plain"), (b"set-cookie", b"k"), (b"X-Auth-Token", b"k")]
    capture = captured(tmp_path, answering(b"", *headers))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(capture), base_url="http://x") as client:
        await client.post("/a")
    (record,) = await records(tmp_path)
    assert record["answer"]["headers"] == {"content-type": "text/plain"}


@pytest.mark.parametrize(
    ("query", "recorded"),
    [
        (b"", b""),
        (b"api_key=k&access_token=k&sig=k&code", b""),
        (
            b"model_name=m&key=k&adapter=a%20b&adapter=&model_version=2",
            b"?model_name=m&adapter=a%20b&adapter=&model_version=2",
        ),
        (b"model%5Fname=m", b"?model%5Fname=m"),
    ],
)
async def test_of_a_query_only_the_choice_of_the_weights_is_recorded(query: bytes, recorded: bytes) -> None:
    assert recorded_query(query) == recorded


async def test_calls_that_come_through_a_mounted_application_are_recorded(tmp_path: Path) -> None:
    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        inner = {**scope, "path": "/invocations", "raw_path": b"/invocations"}
        await scope["app"](inner, receive, send)

    client = server(tmp_path, [Mount("/endpoints/", mounted)])
    reply = await client.post("/endpoints/e/invocations", json=BODY)
    assert reply.status_code == 200
    (record,) = await records(tmp_path)
    assert (record["path"], json.loads(record["body"])) == ("/invocations", BODY)


@pytest.mark.usefixtures("no_collection_by_itself")
@pytest.mark.parametrize("fails", [False, True])
async def test_a_captured_call_leaves_no_cycle_with_its_body(tmp_path: Path, fails: bool) -> None:
    size = 1 << 20

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if fails:
            raise ValueError(len(body))
        await send({"type": "http.response.body", "body": body})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * size}

    def written() -> int:
        return sum(file.read_bytes().count(b"\n") for file in tmp_path.rglob("*.jsonl"))

    capture = captured(tmp_path, application)
    bytes_in_cycles()
    for number in range(1, 5):
        with contextlib.suppress(ValueError):
            await capture({**SCOPE}, receive, nowhere)
        await until(lambda expected=number: written() == expected)
        assert bytes_in_cycles() < size
