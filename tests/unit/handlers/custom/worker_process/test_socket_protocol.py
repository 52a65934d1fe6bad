"""The messages on the socket between server and worker."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from handlers.custom.worker_process.socket_protocol import Message, MessageKind, ServerConnection

pairs = st.lists(st.tuples(st.text(), st.text()), max_size=5).map(tuple)
contents = st.lists(st.tuples(st.none() | st.text(), st.binary(max_size=100)), max_size=5).map(tuple)
messages = st.builds(
    Message,
    kind=st.sampled_from(MessageKind),
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
    server_end, worker_end = socket.socketpair()
    with server_end, worker_end:
        server_end.sendall(b"".join(message.encode() for message in sent))
        server_end.close()
        connection = ServerConnection(worker_end)
        assert [connection.receive() for _ in sent] == sent
        assert connection.receive() is None


def test_a_message_that_is_cut_short_by_the_servers_end_is_none() -> None:
    server_end, worker_end = socket.socketpair()
    with server_end, worker_end:
        call = Message(kind=MessageKind.CALL, call=1, contents=(("data", b"whole"),))
        server_end.sendall(Message(kind=MessageKind.STOP).encode() + call.encode()[:-1])
        server_end.close()
        connection = ServerConnection(worker_end)
        assert connection.receive() == Message(kind=MessageKind.STOP)
        assert connection.receive() is None
