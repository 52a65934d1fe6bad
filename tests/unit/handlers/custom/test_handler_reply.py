"""The parts of an answer, as handlers in async mode and rolling batches send them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python.outputs import Output
from handlers.custom.handler_reply import decode_part


@given(st.text(), st.booleans(), st.none() | st.integers(100, 599))
def test_parts_are_read_as_the_sdk_writes_them(data: str, last: bool, code: int | None) -> None:
    fields = {"data": data, "last": last} | ({"code": code, "error": "e"} if code is not None else {})
    part = decode_part(bytes(Output.binary_encode(fields)))
    assert part is not None
    assert (part.data, part.last, part.code) == (data, last, code)


@given(st.binary(max_size=60))
def test_a_part_followed_by_anything_is_no_part(content: bytes) -> None:
    part = bytes(Output.binary_encode({"data": "x", "last": True}))
    assert (decode_part(part + content) is None) is bool(content)


@pytest.mark.parametrize("content", [b"", b"\x00", b"plain text", b"\x00\x01\x00\x00\x00\x04data", b"\xff\xff"])
def test_plain_content_is_no_part(content: bytes) -> None:
    assert decode_part(content) is None
