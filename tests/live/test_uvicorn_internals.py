"""The parts of the installed uvicorn that `container.http.uvicorn_protocol` relies on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from container.http.uvicorn_protocol import BREAK_OFF, HttpProtocol, chunked_connection
from container.server import http_server, listen

_CONNECTION = ("cycle", "pipeline", "scope", "headers", "url", "parser", "flow", "timeout_keep_alive_task", "transport")
_REQUEST = (
    *("chunked_encoding", "expected_content_length", "response_started", "response_complete", "body", "more_body"),
    *("disconnected", "message_event", "waiting_for_100_continue", "keep_alive", "flow", "transport"),
)


@pytest.mark.asyncio
async def test_a_connection_and_its_request_have_what_is_relied_on() -> None:
    seen: list[tuple[HttpProtocol, RequestResponseCycle]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        connection = next(iter(server.server_state.connections))
        assert isinstance(connection, HttpProtocol)
        seen.append((connection, connection.cycle))
        assert callable(scope["extensions"][BREAK_OFF])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = send({"type": "http.response.body", "body": b"part", "more_body": True})
        with pytest.raises(StopIteration):  # a send waits only while writing is paused
            sending.send(None)
        chunked = chunked_connection(send)
        assert (chunked is None) is (scope["http_version"] == "1.0")  # `send` is no longer uvicorn's then
        if chunked is not None:
            chunked.write(b"3\r\nnew\r\n")
        await send({"type": "http.response.body", "body": b"end"})

    listener = listen("127.0.0.1", 0)
    server = http_server(application)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        for version, end in ((b"1.0", b"partend"), (b"1.1", b"4\r\npart\r\n3\r\nnew\r\n3\r\nend\r\n0\r\n\r\n")):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/%s\r\nHost: x\r\nConnection: close\r\n\r\n" % version)
            assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"\r\n\r\n" + end)
            writer.close()
    finally:
        server.should_exit = True
        await serving
        listener.close()
    assert len(seen) == 2
    for connection, request in seen:
        assert [name for name in _CONNECTION if not hasattr(connection, name)] == []
        assert [name for name in _REQUEST if not hasattr(request, name)] == []
        assert request.response_complete
