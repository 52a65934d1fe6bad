"""The head of a request: its parts, and its id, which is the client's or a new UUID."""

from __future__ import annotations

import uuid

import pytest

from container.http.request_head import RequestHead, request_id


def test_a_safe_id_of_the_client_is_kept() -> None:
    assert request_id(b"order-17/b") == "order-17/b"


@pytest.mark.parametrize("header", [None, b"", b"two words", b"line\nend", "caf\xe9".encode(), b"x" * 129])
def test_without_a_safe_id_each_request_gets_a_random_uuid(header: bytes | None) -> None:
    ids = [request_id(header) for _ in range(200)]
    assert len(set(ids)) == 200
    for each in ids:
        parsed = uuid.UUID(each)
        assert (str(parsed), parsed.version, parsed.variant) == (each, 4, uuid.RFC_4122)
    for place in (0, 9, 15, 20, 35):  # random digits of each part
        assert len({each[place] for each in ids}) > 8
    assert {each[19] for each in ids} == set("89ab")


def test_a_call_has_the_parts_of_its_head() -> None:
    attributes = b"Model_Name=m; route=blue"
    scope = {
        "method": "POST",
        "path": "/a",
        "raw_path": b"/a",
        "query_string": b"k=1&k=2",
        "headers": [(b"x-a", b"1"), (b"x-a", b"2"), (b"x-amzn-sagemaker-custom-attributes", attributes)],
    }
    head = RequestHead(scope)
    assert head.attributes == [(b"model_name", b"m"), (b"route", b"blue")]
    call = head.call(b"body")
    assert (call.body, call.method, call.path, call.query) == (b"body", "POST", "/a", (("k", "1"), ("k", "2")))
    assert (call.header("X-A"), call.header("X-B"), call.request_id) == ("2", None, head.request_id)
