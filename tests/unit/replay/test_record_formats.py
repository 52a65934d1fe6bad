"""The formats of a recorded request."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.record_formats import Malformed, read_line
from replay.request import RecordedRequest

JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    (
        *("captureData", "eventMetadata", "custom_id", "url", "path", "body", "body_base64", "headers", "answer"),
        *("id", "time", "method", "endpointInput", "endpointOutput", "data", "encoding", "status", "complete"),
    )
)
RECORDS = st.recursive(JSON_VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=5), max_leaves=12)


def read(record: Any, path: str = "/invocations") -> RecordedRequest:
    return read_line(json.dumps(record).encode(), "a.jsonl:1", path)


def part(data: str, encoding: str = "JSON", kind: str = "application/json") -> dict[str, str]:
    return {"observedContentType": kind, "mode": "INPUT", "data": data, "encoding": encoding}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_malformed(line: bytes) -> None:
    with contextlib.suppress(Malformed):
        read_line(line, "a", "/")


@given(RECORDS)
def test_any_json_is_a_request_or_malformed(record: Any) -> None:
    with contextlib.suppress(Malformed):
        assert read(record).path.startswith("/")


def test_nested_json_is_malformed() -> None:
    with pytest.raises(Malformed, match="the JSON is nested too deeply"):
        read_line(b"[" * 100_000, "a", "/")


def test_a_capture_of_sagemaker_is_read() -> None:
    body, answer = '{"inputs": "ü"}', base64.b64encode(b'{"a": 1}\n').decode()
    found = read(
        {
            "captureData": {
                "endpointInput": part(body),
                "endpointOutput": part(answer, "BASE64", "application/jsonlines"),
            },
            "eventMetadata": {
                "eventId": "e",
                "inferenceId": "i",
                "inferenceTime": "2026-01-01T00:00:01Z",
                "customAttributes": ["route=/generate"],
            },
            "eventVersion": "0",
        }
    )
    assert (found.id, found.method, found.path, found.body) == ("e", "POST", "/invocations", body.encode())
    assert found.header("x-amzn-sagemaker-custom-attributes") == "route=/generate"
    assert found.time == 1767225601.0
    assert found.reply is not None
    assert (found.reply.body, found.reply.content_type) == (b'{"a": 1}\n', "application/jsonlines")
    assert not found.reply.headers_known


def test_a_capture_without_output_has_no_answer() -> None:
    found = read({"captureData": {"endpointInput": part("1,2", "CSV", "text/csv")}}, "/other")
    assert (found.reply, found.path, found.body, found.id) == (None, "/other", b"1,2", "a.jsonl:1")


def test_a_line_of_a_batch_is_read() -> None:
    found = read({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}})
    assert (found.id, found.path, found.header("content-type")) == ("c", "/v1/chat/completions", "application/json")
    assert json.loads(found.body) == {"model": "m"}


@given(body=JSON_VALUES.filter(lambda value: value is not None), answer=JSON_VALUES)
def test_a_plain_record_keeps_its_bodies(body: Any, answer: Any) -> None:
    found = read({"path": "/a?b=c", "body": body, "answer": {"status": 424, "body": answer}})
    assert (found.route, found.path) == ("/a", "/a?b=c")
    assert found.body == (body.encode() if isinstance(body, str) else found.body)
    if not isinstance(body, str):
        assert json.loads(found.body) == body
    assert found.reply is not None
    assert found.reply.status == 424


HEADER = " must be the value of a header, in Latin-1"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "it is an array; expected a JSON object"),
        ({"a": 1}, "it has none of `captureData` (SageMaker), `custom_id` (OpenAI's batches) or `path`"),
        ({"path": "generate"}, "`path` must be a path that begins with /"),
        ({"path": "/a b"}, "`path` must have visible ASCII characters"),
        ({"path": "/a\r\nx: y"}, "`path` must have visible ASCII characters"),
        ({"path": "http://host/a"}, "`path` must be a path that begins with /"),
        ({"path": "/../a"}, "`path` must have no segment `.` or `..`"),
        ({"path": "/a/%2E%2e/b"}, "`path` must have no segment `.` or `..`"),
        ({"path": "/a/..%2fb"}, "`path` must have no segment `.` or `..`"),
        ({"path": "/a/..;/b"}, "`path` must have no segment `.` or `..`"),
        ({"path": "/a\\..\\b"}, "`path` must have no segment `.` or `..`"),
        ({"custom_id": "a", "url": "/a/.", "body": {}}, "`url` must have no segment `.` or `..`"),
        ({"path": "/", "time": 1e308}, "`time` must be a time such as"),
        ({"path": "/", "time": float("nan")}, "`time` must be a time such as"),
        ({"path": "/", "method": 1}, "`method` must be an HTTP method"),
        ({"path": "/", "headers": []}, "`headers` must be an object, got an array"),
        ({"path": "/", "headers": {"a b": "c"}}, "`headers` has a key that is no name of a header"),
        ({"path": "/", "headers": {"a": "\n"}}, "`headers.a` must be a string of visible characters"),
        ({"path": "/", "body_base64": "?"}, "`body_base64` must be base64"),
        ({"path": "/", "time": "yesterday"}, "`time` must be a time such as"),
        ({"path": "/", "answer": 1}, "`answer` must be an object, got a number"),
        ({"path": "/", "answer": {"status": 99}}, "`answer.status` must be an integer from 100 to 599"),
        ({"path": "/", "answer": {"seconds": -1}}, "`answer.seconds` must be a number of at least 0"),
        ({"path": "/", "id": []}, "the id must be a string, got an array"),
        ({"path": "/", "body": "\ud800"}, "`body` has half of a surrogate pair"),
        ({"custom_id": "a", "response": {}}, "it is a line of a batch's output"),
        ({"custom_id": "a", "url": "/v1/x", "body": "a"}, "`body` must be an object, got a string"),
        ({"captureData": {}}, "`captureData.endpointInput` must be an object, got nothing"),
        (
            {"captureData": {"endpointInput": part("a", "XML")}},
            "`captureData.endpointInput.encoding` must be JSON, CSV or BASE64",
        ),
        ({"captureData": {"endpointInput": part("?", "BASE64")}}, "`captureData.endpointInput.data` must be base64"),
        ({"captureData": {"endpointInput": part("{}") | {"observedContentType": 1}}}, "must be a string, got a number"),
        ({"captureData": {"endpointInput": part("{}", kind="text/\u65e5")}}, HEADER),
        ({"captureData": {"endpointInput": part("{}", kind="text/plain\nx: y")}}, HEADER),
        ({"captureData": {"endpointInput": part("{}")}, "eventMetadata": {"customAttributes": "\u65e5"}}, HEADER),
        ({"path": "/", "time": 10**400}, "`time` must be a time such as"),
        ({"path": "/", "answer": {"seconds": 10**400}}, "`answer.seconds` must be a number of at least 0"),
    ],
)
def test_a_malformed_record_is_named_with_the_expected_value(record: Any, message: str) -> None:
    with pytest.raises(Malformed) as caught:
        read(record)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("method", "path", "is_management"),
    [
        ("POST", "/invocations", False),
        ("POST", "/models/m/invoke", False),
        ("POST", "/v1/responses", False),
        ("POST", "/update", False),
        ("GET", "/models", False),
        ("GET", "/adapters/a", False),
        ("POST", "/models?url=s3://b/x", True),
        ("POST", "//models/", True),
        ("POST", "/m%6fdels", True),
        ("PUT", "/models/m", True),
        ("DELETE", "/v1/responses/r", True),
        ("POST", "/adapters", True),
        ("POST", "/models/m/adapters/a/update", True),
        ("POST", "/v1/load_lora_adapter", True),
        ("POST", "/v1/unload_lora_adapter", True),
        ("POST", "/v1/abort_request", True),
        ("POST", "/sleep", True),
        ("POST", "/reset_prefix_cache", True),
        ("POST", "/update_weights", True),
        ("POST", "/v2/repository/models/m/unload", True),
        ("POST", "/v2/systemsharedmemory/region/r/register", True),
    ],
)
def test_requests_that_change_a_server_are_known(method: str, path: str, is_management: bool) -> None:
    assert read({"path": path, "method": method}).is_management is is_management
    if path.startswith("/") and method == "POST":
        attributes = {"x-amzn-sagemaker-custom-attributes": f"route={path}"}
        assert read({"path": "/invocations", "headers": attributes}).is_management is (
            is_management and "?" not in path
        )


@pytest.mark.parametrize(
    ("body", "greedy"),
    [
        ({"parameters": {"do_sample": False}}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "do_sample": True}, True),
        ({"parameters": {"do_sample": False, "temperature": 0.5}}, False),
        ({"temperature": 1}, False),
        ({"temperature": None}, False),
        ({"inputs": "temperature"}, False),
        ({"inputs": "a", "parameters": {"max_new_tokens": 2, "watermark": False}}, True),
        ({"inputs": "a", "parameters": {"top_p": 0.5}}, False),
        ([1], False),
    ],
)
def test_a_request_is_greedy_if_it_says_so(body: Any, greedy: bool) -> None:
    assert read({"path": "/", "body": body}).greedy is greedy


def test_requests_to_other_routes_than_tgis_may_be_sampled() -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    assert not read({"path": "/invocations", "body": body}).greedy
