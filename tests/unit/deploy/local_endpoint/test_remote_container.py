"""A container in another process or on another machine, to which `slipway local` passes requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from container.http.cross_site import KnownHosts
from deploy.local_endpoint.remote_container import RemoteContainer
from tests.unit.deploy.local_endpoint.local_endpoint import local_endpoint


@contextlib.asynccontextmanager
async def container(reply: bytes, lines: list[bytes]) -> AsyncIterator[str]:
    """Serve the same bytes for each request, close the connection, and keep the request lines."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines.append(head.partition(b"\r\n")[0])
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("path", [b"/a/../b", b"/a/./b/", b"/%2e%2e/a", b"//a//b", b"/a%2fb?c=../d"])
@pytest.mark.parametrize("prefix", ["", "/prefix"])
async def test_the_container_gets_the_very_path_of_the_client(path: bytes, prefix: str) -> None:
    lines: list[bytes] = []
    async with container(b"HTTP/1.1 200 OK\r\nDate: x\r\nContent-Length: 0\r\n\r\n", lines) as url:
        remote = RemoteContainer(url + prefix, KnownHosts())
        async with local_endpoint(remote) as client:
            reply = await client.get("/", extensions={"target": path})
        await remote.close()
    assert lines == [b"GET " + prefix.encode() + path + b" HTTP/1.1"]
    assert len(reply.headers.get_list("date")) == 1


async def test_a_container_that_closes_the_connection_gave_no_answer() -> None:
    async with container(b"", []) as url:
        remote = RemoteContainer(url, KnownHosts())
        async with local_endpoint(remote) as client:
            direct = await client.post("/invocations", content=b"{}")
            of_endpoint = await client.post("/endpoints/e/invocations", content=b"{}")
            stream = await client.post("/endpoints/e/invocations-response-stream", content=b"{}")
        await remote.close()
    assert direct.status_code == 502
    for reply in (of_endpoint, stream):
        assert (reply.status_code, reply.headers["x-amzn-errortype"]) == (424, "ModelError")
        assert reply.json()["OriginalStatusCode"] == 0
        assert "could not get a response" in reply.json()["OriginalMessage"]
