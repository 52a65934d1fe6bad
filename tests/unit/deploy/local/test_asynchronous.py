"""Asynchronous invocations of the local endpoint: a bounded queue, results in a folder, and what cannot be done."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from deploy.local.asynchronous import WORKERS, StoreError, split_s3, write_file
from tests.unit.deploy.local.local_endpoint import ScriptedContainer, Seen, Send, answering, local_endpoint, silent
from tests.waiting import until

pytestmark = pytest.mark.asyncio

ASYNC = "/endpoints/e/async-invocations"
X = "x-amzn-sagemaker-"


async def result(response: httpx.Response, kind: str) -> bytes:
    """What comes to be at a location."""
    assert response.status_code == 202
    path = Path(response.headers[X + kind].removeprefix("file://"))
    await until(path.exists)
    return await asyncio.to_thread(path.read_bytes)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def test_an_answer_comes_to_the_folder_and_the_container_gets_an_id(tmp_path: Path) -> None:
    container = ScriptedContainer(answering(200, b"done"))
    async with local_endpoint(container, async_output=str(tmp_path)) as client:
        headers = {f"{X}content-type": "text/plain", f"{X}accept": "text/csv", "content-type": "not/this"}
        response = await client.post(ASYNC, content=b"body", headers=headers)
        assert await result(response, "outputlocation") == b"done"
    (seen,) = container.seen
    assert (seen.body, seen.headers["content-type"], seen.headers["accept"]) == (b"body", "text/plain", "text/csv")
    assert seen.headers[f"{X}inference-id"] == response.json()["InferenceId"]
    assert seen.headers[f"{X}forwarded-api"] == "InvokeEndpointAsync"
    assert [name[36:] for name in names(tmp_path)] == [".out"]


async def test_an_answer_may_be_larger_than_that_of_a_real_time_call(tmp_path: Path) -> None:
    container = ScriptedContainer(answering(200, b"x" * 2000))
    async with local_endpoint(container, async_output=str(tmp_path), max_payload=1000) as client:
        assert await result(await client.post(ASYNC, content=b"x"), "outputlocation") == b"x" * 2000


async def test_a_call_has_its_own_time_limit_and_fails_in_the_other_place(tmp_path: Path) -> None:
    async def slow(seen: Seen, send: Send) -> None:
        await asyncio.sleep(1.5)
        await answering(200, b"late")(seen, send)

    async with local_endpoint(ScriptedContainer(slow), async_output=str(tmp_path), answer_timeout=0.1) as client:
        patient = await client.post(ASYNC, content=b"x")
        hasty = await client.post(ASYNC, content=b"x", headers={f"{X}invocationtimeoutseconds": "1"})
        assert b"timed out" in await result(hasty, "failurelocation")
        assert await result(patient, "outputlocation") == b"late"


async def test_a_call_waits_for_a_container_that_is_still_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.local.asynchronous._AGAIN_SECONDS", 0.05)
    container = ScriptedContainer(answering(503), ping=503)
    async with local_endpoint(container, async_output=str(tmp_path)) as client:
        response = await client.post(ASYNC, content=b"x")
        await until(lambda: container.pings > 2)
        assert names(tmp_path) == []
        container.script = answering(200, b"done")
        assert await result(response, "outputlocation") == b"done"


async def test_a_full_queue_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.local.asynchronous.QUEUE_SIZE", 1)
    container = ScriptedContainer(silent)
    async with local_endpoint(container, async_output=str(tmp_path)) as client:
        statuses = []
        for _ in range(6):
            statuses.append((await client.post(ASYNC, content=b"x")).status_code)
            await until(lambda: len(container.seen) == min(len(statuses), WORKERS))
    assert statuses == [202] * 5 + [503]


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        ({}, b"", "One of InputLocation and Body is required."),
        ({"inputlocation": "s3://b/k"}, b"x", "InputLocation and Body cannot be given together."),
        ({"inputlocation": "https://b/k"}, b"", "expected s3://bucket/key"),
        ({"inputlocation": "s3://bucket"}, b"", "expected s3://bucket/key"),
        ({"inputlocation": "ftp://b/k"}, b"", "at 'inputLocation' failed to satisfy"),
        ({"s3outputpathextension": "a/../../b"}, b"x", "Member must not contain . or .. as a segment"),
        ({"filename": "../x"}, b"x", "at 'filename' failed to satisfy"),
        ({"filename": "a/b"}, b"x", "at 'filename' failed to satisfy"),
        ({"requestttlseconds": "59"}, b"x", "Value '59' at 'requestTTLSeconds' failed to satisfy"),
        ({"requestttlseconds": "x"}, b"x", "Value 'x' at 'requestTTLSeconds' failed to satisfy"),
        ({"invocationtimeoutseconds": "3601"}, b"x", "Member must be between 1 and 3600"),
    ],
)
async def test_a_wrong_call_is_refused_at_once(
    tmp_path: Path, headers: dict[str, str], body: bytes, message: str
) -> None:
    async with local_endpoint(ScriptedContainer(answering()), async_output=str(tmp_path / "out")) as client:
        response = await client.post(ASYNC, content=body, headers={X + name: value for name, value in headers.items()})
    assert (response.status_code, response.headers["x-amzn-errortype"]) == (400, "ValidationError")
    assert message in response.json()["Message"]
    assert not (tmp_path / "out").exists()


async def test_inline_bodies_have_a_limit_of_their_own(tmp_path: Path) -> None:
    async with local_endpoint(ScriptedContainer(answering()), async_output=str(tmp_path)) as client:
        response = await client.post(ASYNC, content=b"x" * 128_001)
    assert response.json() == {"Message": "HTTP content length exceeded 128000 bytes."}
    assert response.status_code == 413


async def test_a_folder_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(StoreError, match="cannot be written: Is a directory"):
        write_file(tmp_path / "a", b"x")
    assert names(tmp_path) == ["a"]


async def test_the_error_of_a_failed_call_is_json(tmp_path: Path) -> None:
    async with local_endpoint(ScriptedContainer(answering(400, b"no")), async_output=str(tmp_path)) as client:
        failure = json.loads(await result(await client.post(ASYNC, content=b"x"), "failurelocation"))
    assert (failure["OriginalStatusCode"], failure["OriginalMessage"]) == (400, "no")


async def test_buckets_and_keys_are_told_apart() -> None:
    assert split_s3("s3://bucket/a/b/") == ("bucket", "a/b")
    assert split_s3("s3://bucket") == ("bucket", "")
