"""Asynchronous calls by boto3. A folder stands for S3, and the container's replies are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from container.sources.location import S3Url
from deploy.local_endpoint import asynchronous
from deploy.local_endpoint.asynchronous import AsyncCall, AsyncCalls
from deploy.local_endpoint.errors import RuntimeApiError
from deploy.local_endpoint.invocation import ContainerRequest
from deploy.local_endpoint.storage import FolderStorage
from deploy.sagemaker.aws import Aws
from deploy.sagemaker.endpoint import NoAnswer, invoke_asynchronously, wait_for_answer
from tests.runtime_client import runtime_at
from tests.unit.deploy.local_endpoint.local_endpoint import (
    Script,
    ScriptedContainer,
    Seen,
    Send,
    answering,
    answering_after,
    local_endpoint,
    piece,
    silent,
    start,
)
from tests.waiting import until

OUTPUT = S3Url("out", "answers")
LENGTH = ("Content-Length", "2")
X = "x-amzn-sagemaker-"
Invoke = Callable[..., Any]


@contextlib.asynccontextmanager
async def endpoint(container: ScriptedContainer, folder: Path, **settings: Any) -> AsyncIterator[Invoke]:
    """Return a function that calls the endpoint `e` asynchronously with boto3."""
    settings = {"async_output": OUTPUT, "s3_folder": folder, **settings}
    async with local_endpoint(container, **settings) as client:
        runtime = runtime_at(str(client.base_url))

        async def invoke(**parameters: Any) -> Any:
            return await asyncio.to_thread(runtime.invoke_endpoint_async, EndpointName="e", **parameters)

        yield invoke
        runtime.close()


async def content(folder: Path, url: str) -> bytes:
    """Wait until a file exists, and return its content."""
    path = folder / url.removeprefix("s3://")
    await until(path.exists)
    return path.read_bytes()


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def failure(folder: Path, accepted: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(await content(folder, accepted["FailureLocation"]))
    return document


async def test_an_inline_call_is_accepted_at_once_and_answered_in_a_file(tmp_path: Path) -> None:
    container = ScriptedContainer(answering(200, b"ok", LENGTH))
    async with endpoint(container, tmp_path) as invoke:
        accepted = await invoke(
            Body=b"\x00body",
            ContentType="application/x-mine",
            Accept="text/plain",
            CustomAttributes="trace=1",
            InferenceId="id-1",
        )
        assert accepted["ResponseMetadata"]["HTTPStatusCode"] == 202
        assert accepted["InferenceId"] == "id-1"
        assert accepted["OutputLocation"] == "s3://out/answers/id-1.out"
        assert accepted["FailureLocation"] == "s3://out/answers/id-1-error.out"
        assert await content(tmp_path, accepted["OutputLocation"]) == b"ok"
    (seen,) = container.seen
    assert (seen.line, seen.body) == ("POST /invocations", b"\x00body")
    assert seen.headers == {
        "content-type": "application/x-mine",
        "accept": "text/plain",
        f"{X}custom-attributes": "trace=1",
        f"{X}inference-id": "id-1",
    }


async def test_the_input_may_be_an_object(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a.json").write_bytes(b'{"inputs": 1}')
    container = ScriptedContainer(answering(200, b"ok", LENGTH))
    async with endpoint(container, tmp_path, async_failures=S3Url("bad", "")) as invoke:
        accepted = await invoke(InputLocation="s3://in/deep/a.json")
        assert await content(tmp_path, accepted["OutputLocation"]) == b"ok"
    assert accepted["OutputLocation"] == f"s3://out/answers/{accepted['InferenceId']}.out"
    assert accepted["FailureLocation"] == f"s3://bad/{accepted['InferenceId']}-error.out"
    assert container.seen[0].body == b'{"inputs": 1}'
    assert container.seen[0].headers == {f"{X}inference-id": accepted["InferenceId"]}


@pytest.mark.parametrize(
    ("parameters", "output", "failed"),
    [
        ({"Filename": "a.json"}, "s3://out/answers/a.json", "s3://out/answers/a.json-error.out"),
        (
            {"S3OutputPathExtension": "/day/1/", "Filename": "a"},
            "s3://out/answers/day/1/a",
            "s3://out/answers/a-error.out",
        ),
        ({"InferenceId": "../a b"}, "s3://out/answers/..%2Fa%20b.out", "s3://out/answers/..%2Fa%20b-error.out"),
    ],
)
async def test_a_call_may_name_its_file(tmp_path: Path, parameters: Any, output: str, failed: str) -> None:
    async with endpoint(ScriptedContainer(answering(200, b"ok", LENGTH)), tmp_path) as invoke:
        accepted = await invoke(Body=b"x", **parameters)
        assert (accepted["OutputLocation"], accepted["FailureLocation"]) == (output, failed)
        assert await content(tmp_path, output) == b"ok"


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        ({}, b"", "Exactly one of InputLocation and Body has to be given."),
        ({"inputlocation": "s3://in/a"}, b"x", "Exactly one of InputLocation and Body has to be given."),
        (
            {},
            b"x" * 128_001,
            "Value at 'body' failed to satisfy constraint: Member must have length less than or equal",
        ),
        ({"inputlocation": "ftp://in/a"}, b"", "at 'inputLocation' failed to satisfy constraint: Member must satisfy"),
        ({"inputlocation": "https://in/a"}, b"", "InputLocation https://in/a cannot be read: allowed: s3://"),
        ({"inputlocation": "s3://in"}, b"", "cannot be read: allowed: s3://bucket/key"),
        (
            {"inputlocation": "s3://in/../../etc/passwd"},
            b"",
            "cannot be read: a key may not have empty parts, `.` and `..`",
        ),
        ({"inputlocation": "s3://../a"}, b"", "cannot be read"),
        ({"requestttlseconds": "59"}, b"x", "Value '59' at 'requestTTLSeconds' failed to satisfy constraint: Member"),
        ({"requestttlseconds": "21601"}, b"x", "Member must have value less than or equal to 21600"),
        ({"requestttlseconds": "1h"}, b"x", "Member must be an integer"),
        ({"invocationtimeoutseconds": "0"}, b"x", "Member must have value greater than or equal to 1"),
        ({"invocationtimeoutseconds": "3601"}, b"x", "Member must have value less than or equal to 3600"),
        ({"s3outputpathextension": "../../a"}, b"x", "at 's3OutputPathExtension' failed to satisfy constraint"),
        ({"s3outputpathextension": "s3://a"}, b"x", "at 's3OutputPathExtension' failed to satisfy constraint"),
        ({"filename": "../a"}, b"x", "at 'filename' failed to satisfy constraint"),
        ({"filename": "a.b.c"}, b"x", "at 'filename' failed to satisfy constraint"),
    ],
)
async def test_a_wrong_call_is_a_validation_error_at_once(
    tmp_path: Path, headers: dict[str, str], body: bytes, message: str
) -> None:
    container = ScriptedContainer()
    async with local_endpoint(container, s3_folder=tmp_path) as client:
        given = {X + name: value for name, value in headers.items()}
        response = await client.post("/endpoints/e/async-invocations", content=body, headers=given)
        assert (response.status_code, response.headers["x-amzn-errortype"]) == (400, "ValidationError")
        assert message in response.json()["Message"]
        other = await client.post("/endpoints/other/async-invocations", content=b"x")
        assert "Endpoint other of account 000000000000 not found." in other.json()["Message"]
    assert container.seen == []
    assert _files(tmp_path) == []


async def test_the_largest_inline_body_is_taken(tmp_path: Path) -> None:
    container = ScriptedContainer(answering(200, b"ok", LENGTH))
    async with endpoint(container, tmp_path) as invoke:
        await content(tmp_path, (await invoke(Body=b"x" * 128_000))["OutputLocation"])
    assert len(container.seen[0].body) == 128_000


async def in_chunks(seen: Seen, send: Send) -> None:
    await start(send)
    await piece(send, b"a")
    await piece(send, b"b", last=True)


@pytest.mark.parametrize(
    ("script", "call", "message", "status"),
    [
        (answering(400, b"no"), {"Body": b"x"}, 'Received client error (400) from primary with message "no".', 400),
        (in_chunks, {"Body": b"x"}, "the answer has no Content-Length", 200),
        (
            answering(200, b"ok", LENGTH, ("X-Long", "x" * 4096)),
            {"Body": b"x"},
            "bytes of headers; SageMaker takes",
            200,
        ),
        (silent, {"Body": b"x", "InvocationTimeoutSeconds": 1}, "Your invocation timed out", 0),
        (silent, {"InputLocation": "s3://in/missing"}, "s3://in/missing cannot be read", None),
        (silent, {"InputLocation": "s3://in/large"}, "s3://in/large has 11 bytes; at most 10 are allowed.", None),
    ],
)
async def test_a_call_without_an_answer_has_a_failure_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, call: Any, message: str, status: int | None
) -> None:
    monkeypatch.setattr(asynchronous, "MAX_PAYLOAD", 10)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "large").write_bytes(b"x" * 11)
    container = ScriptedContainer(script)
    async with endpoint(container, tmp_path) as invoke:
        accepted = await invoke(**call)
        found = await failure(tmp_path, accepted)
        await until(lambda: container.ended == len(container.seen))
    assert message in found["Message"]
    assert found.get("OriginalStatusCode") == status
    assert not (tmp_path / accepted["OutputLocation"].removeprefix("s3://")).exists()


@pytest.fixture
def large_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Url:
    monkeypatch.setattr(asynchronous, "_LARGE", 10)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "large").write_bytes(b"x" * 11)
    return S3Url("in", "large")


async def test_inputs_that_are_large_are_held_one_at_a_time(tmp_path: Path, large_input: S3Url) -> None:
    may_end = asyncio.Event()
    container = ScriptedContainer(answering_after(may_end))
    async with endpoint(container, tmp_path) as invoke:
        accepted = [await invoke(InputLocation=str(large_input)) for _ in range(3)]
        await invoke(Body=b"small")
        await until(lambda: len(container.seen) == 2)
        assert sorted(len(seen.body) for seen in container.seen) == [5, 11]
        may_end.set()
        for each in accepted:
            await content(tmp_path, each["OutputLocation"])


async def test_calls_wait_while_the_model_is_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "_PING_SECONDS", 0.01)
    container = ScriptedContainer(answering(503), ping=503)
    async with endpoint(container, tmp_path) as invoke:
        accepted = [await invoke(Body=b"x") for _ in range(2)]
        await until(lambda: container.pings > 4)
        container.script, container.ping = answering(200, b"ok", LENGTH), 200
        for each in accepted:
            assert await content(tmp_path, each["OutputLocation"]) == b"ok"
    assert len(container.seen) == 4


class Queue:
    """The queue without HTTP, for times and states that the API does not allow."""

    def __init__(self, container: ScriptedContainer, folder: Path, concurrency: int = 1) -> None:
        self.calls = AsyncCalls(FolderStorage(folder), None, concurrency)
        self._container, self._folder, self._count = container, folder, 0

    def submit(self, **changes: Any) -> Path:
        """Add a call and return the path of its failure file."""
        self._count += 1
        scope = {"type": "http", "app": self._container, "method": "POST", "headers": [], "extensions": {}}
        call = AsyncCall(
            scope=scope,
            request=ContainerRequest(endpoint="e", headers=[], body=b"x"),
            source=None,
            output=S3Url("out", f"{self._count}.out"),
            failure=S3Url("out", f"{self._count}-error.out"),
            request_id=f"r{self._count}",
            inference_id=str(self._count),
            ttl=60.0,
            timeout=60.0,
        )
        self.calls.submit(dataclasses.replace(call, **changes))
        return self._folder / "out" / f"{self._count}-error.out"


@pytest.mark.parametrize(("awaited", "ping"), [("a call", 200), ("the model", 503), ("a large input", 200)])
async def test_a_call_expires_while_it_waits(tmp_path: Path, large_input: S3Url, awaited: str, ping: int) -> None:
    container = ScriptedContainer(silent if ping == 200 else answering(503), ping)
    source, concurrency = (large_input, 2) if awaited == "a large input" else (None, 1)
    queue = Queue(container, tmp_path, concurrency)
    queue.submit(source=source)
    await until(lambda: container.seen)
    expired = queue.submit(source=source, ttl=0.05)
    await until(expired.exists)
    assert "The request has expired: it waited for 0.05 s" in json.loads(expired.read_bytes())["Message"]
    await queue.calls.drain(0.0)


async def test_no_more_calls_run_at_a_time_than_allowed_and_no_more_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynchronous, "MAX_CALLS", 3)
    container = ScriptedContainer(silent)
    queue = Queue(container, tmp_path, concurrency=2)
    for _ in range(3):
        queue.submit()
    await until(lambda: len(container.seen) == 2)
    with pytest.raises(RuntimeApiError, match="3 "):
        queue.submit()
    await queue.calls.drain(0.0)
    assert len(container.seen) == 2


async def test_a_stop_gives_up_calls_that_wait_and_lets_running_ones_end(tmp_path: Path) -> None:
    may_end = asyncio.Event()
    container = ScriptedContainer(answering_after(may_end))
    queue = Queue(container, tmp_path)
    queue.submit()
    waiting = queue.submit()
    await until(lambda: container.seen)
    draining = asyncio.create_task(queue.calls.drain(60.0))
    await until(waiting.exists)
    assert "The local endpoint was stopped" in json.loads(waiting.read_bytes())["Message"]
    with pytest.raises(RuntimeApiError):
        queue.submit()
    assert not draining.done()
    may_end.set()
    await draining
    assert (tmp_path / "out" / "1.out").read_bytes() == b"ok"
    assert len(container.seen) == 1


async def test_a_stop_gives_up_running_calls_in_the_end(tmp_path: Path) -> None:
    container = ScriptedContainer(silent)
    queue = Queue(container, tmp_path)
    running = queue.submit()
    await until(lambda: container.seen)
    await queue.calls.drain(0.05)
    assert "The local endpoint was stopped" in json.loads(running.read_bytes())["Message"]
    assert container.ended == 1


async def test_a_place_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "out").write_bytes(b"a file in place of the folder")
    queue = Queue(ScriptedContainer(answering(200, b"ok", LENGTH)), tmp_path)
    queue.submit()
    await until(lambda: "s3://out/1-error.out cannot be written" in caplog.text)
    await queue.calls.drain(0.0)


async def test_without_settings_answers_are_in_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    caplog.set_level("INFO")
    async with local_endpoint(ScriptedContainer(answering(200, b"ok", LENGTH))) as client:
        accepted: httpx.Response = await client.post("/endpoints/e/async-invocations", content=b"x")
        assert accepted.status_code == 202
        (folder,) = _files(tmp_path)
        assert await content(folder, accepted.headers[f"{X}outputlocation"]) == b"ok"
    assert f"s3://bucket/key is the file {folder}/bucket/key" in caplog.text


async def test_slipway_invoke_reads_an_answer_and_a_failure_without_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(seen: Seen, send: Send) -> None:
        await answering(424 if seen.body == b"wrong" else 200, b"ok", LENGTH)(seen, send)

    async with local_endpoint(ScriptedContainer(script), async_output=OUTPUT, s3_folder=tmp_path) as client:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # No other service of AWS can be reached.
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", str(client.base_url))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")
        aws = Aws("us-east-1")

        def asked(request: bytes) -> bytes:
            places = invoke_asynchronously(aws.client("sagemaker-runtime"), "e", request=request)
            return wait_for_answer(aws.client("s3", url=places.s3), places, 20)

        assert await asyncio.to_thread(asked, b"right") == b"ok"
        with pytest.raises(NoAnswer, match="CLIENT_ERROR_FROM_MODEL"):
            await asyncio.to_thread(asked, b"wrong")


async def test_the_endpoint_shows_the_answers_of_its_folder_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_bytes(b"secret")
    (tmp_path / "secret").write_bytes(b"secret")
    container = ScriptedContainer(answering(200, b"ok", LENGTH))
    async with local_endpoint(container, async_output=OUTPUT, s3_folder=tmp_path) as client:
        head = {"X-Amzn-SageMaker-Content-Type": "text/plain"}
        accepted = await client.post("/endpoints/e/async-invocations", content=b"a", headers=head)
        place = accepted.headers[f"{X}outputlocation"]
        await content(tmp_path, place)
        objects = accepted.headers["x-slipway-objects"]
        assert (await client.get(f"{objects}/{place.removeprefix('s3://')}")).content == b"ok"
        for other in ("out/secret", "out/answers/none", "out/answers/%2e%2e/secret", "secret/x"):
            refused = await client.get(f"{objects}/{other}")
            assert (refused.status_code, b"NoSuchKey" in refused.content) == (404, True), other
        assert (await client.get("/endpoints/other/s3/out/answers/x")).status_code == 400


async def test_the_endpoint_shows_the_answers_of_an_earlier_process(tmp_path: Path) -> None:
    (tmp_path / "out" / "answers").mkdir(parents=True)
    (tmp_path / "out" / "answers" / "x.out").write_bytes(b"earlier")
    container = ScriptedContainer(answering(200, b"ok", LENGTH))
    async with local_endpoint(container, async_output=OUTPUT, s3_folder=tmp_path) as client:
        found = await client.get("/endpoints/e/s3/out/answers/x.out")
        assert (found.status_code, found.content) == (200, b"earlier")
        head = {"X-Amzn-SageMaker-Content-Type": "text/plain"}
        accepted = await client.post("/endpoints/e/async-invocations", content=b"a", headers=head)
        assert await content(tmp_path, accepted.headers[f"{X}outputlocation"]) == b"ok"


async def test_an_endpoint_with_s3_shows_no_objects(tmp_path: Path) -> None:
    async with local_endpoint(ScriptedContainer(), async_output=OUTPUT, uses_s3=True) as client:
        assert (await client.get("/endpoints/e/s3/out/answers/x")).status_code == 404
