"""The bytes between server and worker."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python.outputs import Output
from handlers.custom.reply import decode_part
from handlers.custom.runtime.channel import Channel, Kind, Message

pairs = st.lists(st.tuples(st.text(), st.text()), max_size=5).map(tuple)
contents = st.lists(st.tuples(st.none() | st.text(), st.binary(max_size=100)), max_size=5).map(tuple)
messages = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    call=st.integers(0, 2**32 - 1),
    code=st.integers(200, 599),
    message=st.text(),
    properties=pairs,
    contents=contents,
    streams=st.booleans(),
    error=st.none() | st.text(),
)


@given(st.lists(messages, max_size=10))
def test_a_worker_reads_the_messages_that_it_was_sent(sent: list[Message]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(message.encode() for message in sent))
        ours.close()
        channel = Channel(theirs)
        assert [channel.receive() for _ in sent] == sent
        assert channel.receive() is None


def test_a_message_that_is_cut_short_by_the_servers_end_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        call = Message(kind=Kind.CALL, call=1, contents=(("data", b"whole"),))
        ours.sendall(Message(kind=Kind.STOP).encode() + call.encode()[:-1])
        ours.close()
        channel = Channel(theirs)
        assert channel.receive() == Message(kind=Kind.STOP)
        assert channel.receive() is None


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
