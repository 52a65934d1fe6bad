"""The bytes between server and worker."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python.outputs import Output
from handlers.workers.reply import decode_part
from handlers.workers.runtime.channel import (
    Channel,
    Frame,
    InputMessage,
    Kind,
    OutputMessage,
    decode_header,
    decode_message,
    encode_message,
)

pairs = st.lists(st.tuples(st.text(), st.text()), max_size=5).map(tuple)
contents = st.lists(st.tuples(st.none() | st.text(), st.binary(max_size=100)), max_size=5).map(tuple)
frames = st.builds(Frame, st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=200))


@given(st.lists(frames, max_size=10))
def test_a_worker_reads_the_frames_that_it_was_sent(sent: list[Frame]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(frame.encode() for frame in sent))
        ours.close()
        assert list(Channel(theirs).read()) == sent


def test_a_frame_that_is_cut_short_by_the_servers_end_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(Frame(Kind.STOP).encode() + Frame(Kind.CALL, 1, b"whole").encode()[:-1])
        ours.close()
        assert list(Channel(theirs).read()) == [Frame(Kind.STOP)]


@pytest.mark.parametrize("header", [b"\x00" * 13, b"\xff" * 13, b"\x00" * 7 + b"\x05\xc8\x00\x00\x00\x00"])
def test_what_is_no_frame_is_recognized(header: bytes) -> None:
    with pytest.raises(ValueError, match=r"frame|Kind"):
        decode_header(header)


@given(pairs, contents)
def test_inputs_come_back_as_they_were(
    properties: tuple[tuple[str, str], ...], entries: tuple[tuple[str | None, bytes], ...]
) -> None:
    message = InputMessage(properties, entries)
    assert decode_message(InputMessage, encode_message(message)) == message


@given(st.integers(200, 599), st.text(), pairs, contents, st.booleans(), st.none() | st.text())
def test_outputs_come_back_as_they_were(
    code: int,
    text: str,
    properties: tuple[tuple[str, str], ...],
    entries: tuple[tuple[str | None, bytes], ...],
    streams: bool,
    error: str | None,
) -> None:
    message = OutputMessage(
        code=code, message=text, properties=properties, contents=entries, streams=streams, error=error
    )
    assert decode_message(OutputMessage, encode_message(message)) == message


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
