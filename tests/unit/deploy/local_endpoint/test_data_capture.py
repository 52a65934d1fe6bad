"""Data capture: SageMaker's records of the calls of an endpoint."""

from __future__ import annotations

import base64
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.local_endpoint.local_endpoint import (
    ScriptedContainer,
    Seen,
    Send,
    answering,
    broken_after,
    local_endpoint,
    piece,
    start,
)
from tests.waiting import until

INVOKE, STREAM = (f"/endpoints/e/{name}" for name in ("invocations", "invocations-response-stream"))
JSON = "application/json"


async def records(directory: Path, count: int = 1) -> list[dict[str, Any]]:
    """Wait for the records, and return them."""
    await until(lambda: len(_lines(directory)) == count)
    return [json.loads(line) for line in _lines(directory)]


def _files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.jsonl"))


def _lines(directory: Path) -> list[str]:
    return [
        line for file in _files(directory) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")
    ]


async def test_a_record_has_sagemakers_fields_and_place(tmp_path: Path) -> None:
    container = ScriptedContainer(answering(200, '{"a": "ü"}'.encode()))
    async with local_endpoint(container, capture=tmp_path) as client:
        headers = {"content-type": "text/csv; charset=utf-8", "x-amzn-sagemaker-inference-id": "id-1"}
        response = await client.post(INVOKE, content=b"1,2\n", headers=headers)
        (record,) = await records(tmp_path)
    time = record["eventMetadata"].pop("inferenceTime")
    assert record == {
        "captureData": {
            "endpointInput": {
                "observedContentType": "text/csv; charset=utf-8",
                "mode": "INPUT",
                "data": "1,2\n",
                "encoding": "CSV",
            },
            "endpointOutput": {
                "observedContentType": JSON,
                "mode": "OUTPUT",
                "data": '{"a": "ü"}',
                "encoding": "JSON",
            },
        },
        "eventMetadata": {"eventId": response.headers["x-amzn-requestid"], "inferenceId": "id-1"},
        "eventVersion": "0",
    }
    (file,) = _files(tmp_path)
    hour = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)Z", time)
    assert hour is not None
    assert file.parent == tmp_path / "e" / "AllTraffic" / Path(*hour.groups()[:4])


@pytest.mark.parametrize(
    ("content_type", "body", "encoding"),
    [
        ("application/x-npy", b"\x93NUMPY", "BASE64"),
        ("application/jsonlines", b"{}\n", "BASE64"),
        ("", b"x", "BASE64"),
        (JSON, b"\xff", "BASE64"),
        ("Application/JSON", b"{}", "JSON"),
    ],
)
async def test_the_content_type_decides_the_encoding(
    tmp_path: Path, content_type: str, body: bytes, encoding: str
) -> None:
    async with local_endpoint(ScriptedContainer(), capture=tmp_path) as client:
        headers = {"content-type": content_type} if content_type else {}
        await client.post(INVOKE, content=body, headers=headers)
        (record,) = await records(tmp_path)
    found = record["captureData"]["endpointInput"]
    assert (found["observedContentType"], found["encoding"]) == (content_type, encoding)
    assert (base64.b64decode(found["data"]) if encoding == "BASE64" else found["data"].encode()) == body
    assert "inferenceId" not in record["eventMetadata"]


async def two_pieces(seen: Seen, send: Send) -> None:
    await start(send)
    await piece(send, b'{"a": ')
    await piece(send, b"1}", last=True)


async def test_attributes_and_another_path_are_recorded_and_only_the_owner_can_read_them(tmp_path: Path) -> None:
    async with local_endpoint(ScriptedContainer(), capture=tmp_path) as client:
        await client.post(INVOKE, content=b"x", headers={"x-amzn-sagemaker-custom-attributes": "route=/generate,a=b"})
        (first,) = await records(tmp_path)
        await client.post("/endpoints/e/openai/v1/chat/completions", content=b"{}")
        _, second = await records(tmp_path, 2)
    assert first["eventMetadata"]["customAttributes"] == ["route=/generate,a=b"]
    assert "path" not in first["eventMetadata"]
    assert second["eventMetadata"]["path"] == "/v1/chat/completions"
    assert {stat.S_IMODE(file.stat().st_mode) for file in _files(tmp_path)} == {0o600}


async def test_calls_that_fail_or_send_nothing_are_not_captured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    container = ScriptedContainer(answering(400, b"no"))
    async with local_endpoint(container, capture=tmp_path) as client:
        assert (await client.post(INVOKE, content=b"failed")).status_code == 424
        assert (await client.post(STREAM, content=b"failed")).status_code == 424
        container.script = broken_after(b"one\n")
        await client.post(STREAM, content=b"broken")
        await until(lambda: "not captured: the answer is incomplete or too large" in caplog.text)
        container.script = answering(200, b"{}")
        await client.get("/endpoints/e/openai/v1/models")
        await client.post(INVOKE, content=b"good")
        (record,) = await records(tmp_path)
    assert base64.b64decode(record["captureData"]["endpointInput"]["data"]) == b"good"


async def test_a_stream_larger_than_an_answer_may_be_reaches_the_client_and_is_not_captured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with local_endpoint(ScriptedContainer(two_pieces), capture=tmp_path, max_payload=7) as client:
        response = await client.post("/endpoints/e/openai/v1/chat/completions", content=b"{}")
        assert response.content == b'{"a": 1}'
        await until(lambda: "not captured: the answer is incomplete or too large" in caplog.text)
    assert _lines(tmp_path) == []


async def test_a_directory_that_cannot_be_written_breaks_no_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "e").write_bytes(b"a file in place of the folder")
    async with local_endpoint(ScriptedContainer(), capture=tmp_path) as client:
        for _ in range(2):
            assert (await client.post(INVOKE, content=b"x")).status_code == 200
        await until(lambda: caplog.text.count("is not captured: ") == 2)
        (tmp_path / "e").unlink()
        await client.post(INVOKE, content=b"x")
        await records(tmp_path)
