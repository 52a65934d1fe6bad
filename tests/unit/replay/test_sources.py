"""Sources: files, folders and S3."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import boto3
import pytest

from replay import sources
from replay.request import RecordedRequest
from replay.sources import MalformedLine, SourceError, open_source
from tests.stand_ins.s3 import BUCKET, CREDENTIALS, moto, put
from tests.unit.replay.stand_in import record, write_source


def no_s3() -> Any:
    raise AssertionError("nothing of this source is on S3")


def read(place: Path) -> list[RecordedRequest | MalformedLine]:
    return list(open_source(str(place), "/invocations", no_s3))


def ids(found: list[RecordedRequest | MalformedLine]) -> list[str]:
    return [one.id if isinstance(one, RecordedRequest) else one.place for one in found]


def line(number: int) -> bytes:
    return json.dumps(record(number)).encode() + b"\n"


def captured(data: str) -> bytes:
    part = {"observedContentType": "application/json", "mode": "INPUT", "data": data, "encoding": "JSON"}
    return json.dumps({"captureData": {"endpointInput": part}, "eventMetadata": {"eventId": data}}).encode() + b"\n"


def test_the_captures_of_an_endpoint_on_s3_are_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    objects = {
        "captures/e/AllTraffic/2026/01/01/01/b.jsonl.gz": gzip.compress(captured("3")),
        "captures/e/AllTraffic/2026/01/01/00/a.jsonl": captured("1") + captured("2"),
        "captures/e/AllTraffic/2026/01/01/00/note.txt": b"no request",
        "captures/e-private/AllTraffic/2026/01/01/00/a.jsonl": captured("5"),
        "other/c.jsonl": captured("4"),
    }
    with moto() as address:
        put(address, objects)
        with contextlib.closing(boto3.client("s3", endpoint_url=address, region_name="us-east-1")) as client:
            found = list(source := open_source(f"s3://{BUCKET}/captures/e", "/invocations", lambda: client))
            (one,) = open_source(f"s3://{BUCKET}/other/c.jsonl", "/invocations", lambda: client)
            with pytest.raises(SourceError):
                open_source(f"s3://{BUCKET}/nothing", "/", lambda: client)
            with pytest.raises(SourceError, match=r"s3://missing-bucket/x .*NoSuchBucket"):
                open_source("s3://missing-bucket/x", "/", lambda: client)
    assert ids(found) == ["1", "2", "3"], "not those of the other endpoint"
    assert ids([one]) == ["4"]
    assert found[0].place == "e/AllTraffic/2026/01/01/00/a.jsonl:1"
    assert source.bytes_read == source.total_bytes > 0


def test_a_capture_that_grows_by_the_replay_is_read_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(line(1) + line(2))
    found = []
    for one in open_source(str(tmp_path), "/", no_s3):
        found.append(one)
        with file.open("ab") as more:
            more.write(line(3))
    assert ids(found) == ["1", "2"]


def test_a_line_that_is_too_long_is_named_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE", 1 << 10)
    file = tmp_path / "a.jsonl"
    file.write_bytes(line(1) + b"x" * 5000 + b"\n" + line(3))
    assert ids(read(file)) == ["1", "a.jsonl:2", "3"]


def test_blank_lines_a_mark_and_a_missing_line_end_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + line(1) + b"\r\n\n" + line(4).rstrip())
    assert ids(read(file)) == ["1", "4"]


def test_the_same_id_in_two_lines_is_two_requests(tmp_path: Path) -> None:
    found = read(write_source(tmp_path / "a.jsonl", [record(1), record(1)]))
    assert len({one.key for one in found if isinstance(one, RecordedRequest)}) == 2
