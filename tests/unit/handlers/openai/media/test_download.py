from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from handlers.openai.media.download import UNREACHABLE, Downloader, DownloadFailed, is_allowed

LOOPBACK = [ipaddress.ip_network("127.0.0.0/8")]
LIMIT = 1 << 20


class TooLarge(Exception):
    pass


@dataclass
class Counter:
    limit: int = LIMIT
    size: int = 0

    def __call__(self, size: int) -> None:
        self.size += size
        if self.size > self.limit:
            raise TooLarge


@dataclass
class Host:
    """A media host on loopback; `answer` writes the reply to a path."""

    answer: Callable[[str, asyncio.StreamWriter], Any]
    requests: list[str] = field(default_factory=list)
    port: int = 0
    connections: list[asyncio.Task[None]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.current_task())
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head)
                await self.answer(head.split()[1], writer)
                await writer.drain()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def hosting(answer: Callable[[str, asyncio.StreamWriter], Any]) -> AsyncIterator[Host]:
    host = Host(answer)
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
        for connection in host.connections:
            connection.cancel()
        await asyncio.gather(*host.connections, return_exceptions=True)


def reply(status: str, body: bytes = b"", *headers: str) -> Callable[[str, asyncio.StreamWriter], Any]:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return answer


async def fetch(url: str, downloader: Downloader, seconds: float = 30.0, limit: int = LIMIT) -> bytes:
    return await downloader.fetch(url, seconds, Counter(limit))


async def failure(url: str, downloader: Downloader, seconds: float = 30.0) -> str:
    with pytest.raises(DownloadFailed) as caught:
        await fetch(url, downloader, seconds)
    return str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.8.8",
            "fec0::1",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "100.100.100.200",
        ),
        *("169.254.169.254", "169.254.170.2", "168.63.129.16", "224.0.0.1", "255.255.255.255", "192.0.0.192"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fc00::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::10.0.0.1"),
        *("2002:7f00:1::", "2002:a9fe:a9fe::1", "64:ff9b:1::1"),
    ],
)
def test_inner_addresses_are_refused(address: str) -> None:
    assert not is_allowed(address, [])


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed(address, [])


def test_networks_of_the_operator_are_allowed_and_no_others() -> None:
    networks = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")]
    assert is_allowed("10.9.9.9", networks)
    assert is_allowed("::ffff:10.9.9.9", networks)
    assert is_allowed("fd12::1", networks)
    assert not is_allowed("192.168.0.1", networks)
    assert not is_allowed("::ffff:192.168.0.1", networks)


async def test_an_inner_address_looks_the_same_whether_something_listens_there_or_not() -> None:
    async with hosting(reply("200 OK", b"secret")) as host:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            names = (
                "127.0.0.1",
                "localhost",
                "127.1",
                "0x7f.1",
                "2130706433",
                "[::ffff:127.0.0.1]",
                "0.0.0.0",
                "[::1]",
            )
            urls = [f"http://{name}:{port}/x" for name in names for port in (host.port, closed.getsockname()[1])]
            urls += ["http://169.254.169.254/latest/meta-data/", "http://no-such-name.invalid/"]
            assert {await failure(url, Downloader([], [])) for url in urls} == {UNREACHABLE}
        assert host.requests == []


async def test_a_name_is_judged_by_the_address_that_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name on the list of domains is refused if it resolves to an address that is not allowed."""
    resolve = socket.getaddrinfo

    def inner(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve("127.0.0.1" if host == "rebound.example" else host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", inner)
    async with hosting(reply("200 OK", b"secret")) as host:
        url = f"http://rebound.example:{host.port}/"
        assert await failure(url, Downloader([], ["rebound.example"])) == UNREACHABLE
        assert host.requests == []
        assert await fetch(url, Downloader(LOOPBACK, ["rebound.example"])) == b"secret"


async def test_an_allowed_network_is_fetched_from() -> None:
    async with hosting(reply("200 OK", b"image")) as host:
        assert await fetch(f"http://127.0.0.1:{host.port}/a?b=c", Downloader(LOOPBACK, [])) == b"image"
        assert host.requests[0].startswith("GET /a?b=c HTTP/1.1\r\n")


async def test_a_redirect_is_not_followed() -> None:
    async with hosting(reply("200 OK", b"secret")) as target:
        location = f"Location: http://127.0.0.1:{target.port}/"
        async with hosting(reply("302 Found", b"", location)) as host:
            url = f"http://127.0.0.1:{host.port}/"
            assert "redirect" in await failure(url, Downloader(LOOPBACK, []))
            assert "redirect" in await failure(url, Downloader(LOOPBACK, ["127.0.0.1"], redirects=True))
            assert target.requests == []
            assert await fetch(url, Downloader(LOOPBACK, [], redirects=True)) == b"secret"


async def test_a_redirect_that_is_followed_leads_to_no_inner_address() -> None:
    async with hosting(reply("200 OK", b"secret")) as target:
        location = f"Location: http://[::ffff:127.0.0.2]:{target.port}/"
        async with hosting(reply("302 Found", b"", location)) as host:
            downloader = Downloader([ipaddress.ip_network("127.0.0.1/32")], [], redirects=True)
            assert await failure(f"http://127.0.0.1:{host.port}/", downloader) == UNREACHABLE


async def test_other_hosts_than_the_allowed_ones_are_not_asked() -> None:
    async with hosting(reply("200 OK", b"secret")) as host:
        for name in ("127.0.0.2", "media.example@127.0.0.2", "media.example%2f@127.0.0.2"):
            text = await failure(f"http://{name}:{host.port}/", Downloader(LOOPBACK, ["media.example"]))
            assert "option.allowed_media_domains" in text
        assert host.requests == []


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "gopher://a", "http://", "http:///x", "/x", "file:///etc/passwd", "http://xn--a/x"]
)
async def test_other_urls_are_refused(url: str) -> None:
    assert await failure(url, Downloader(LOOPBACK, [])) == "must be an http, https or data URL"


async def test_a_body_without_an_end_is_left_at_the_limit() -> None:
    async def endless(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while not writer.is_closing():
            writer.write(bytes(1 << 16))
            await writer.drain()

    async with hosting(endless) as host:
        with pytest.raises(TooLarge):
            await fetch(f"http://127.0.0.1:{host.port}/", Downloader(LOOPBACK, []))


async def test_nothing_is_decompressed() -> None:
    bomb = gzip.compress(bytes(8 << 20))
    async with hosting(reply("200 OK", bomb, "Content-Encoding: gzip")) as host:
        assert await fetch(f"http://127.0.0.1:{host.port}/", Downloader(LOOPBACK, []), limit=len(bomb)) == bomb


async def test_a_host_that_does_not_answer_is_left() -> None:
    async def silent(path: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with hosting(silent) as host:
        url = f"http://127.0.0.1:{host.port}/"
        assert await failure(url, Downloader(LOOPBACK, []), seconds=0.05) == (
            "cannot be fetched: its host did not answer in time"
        )


async def test_a_busy_host_is_asked_again() -> None:
    answers = [reply("503 Busy"), reply("200 OK", b"image")]

    async def in_turn(path: str, writer: asyncio.StreamWriter) -> None:
        await answers.pop(0)(path, writer)

    async with hosting(in_turn) as host:
        assert await fetch(f"http://127.0.0.1:{host.port}/", Downloader(LOOPBACK, [], attempts=2)) == b"image"


@pytest.mark.parametrize("status", ["404 Not Found", "503 Busy"])
async def test_an_error_of_the_host_is_told(status: str) -> None:
    async with hosting(reply(status, b"secret")) as host:
        text = await failure(f"http://127.0.0.1:{host.port}/", Downloader(LOOPBACK, []))
        assert text.endswith(status[:3])


async def test_a_proxy_of_the_environment_is_used_and_not_led_to_inner_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosting(reply("200 OK", b"image")) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert await fetch("http://media.example/a", Downloader([], [])) == b"image"
        assert proxy.requests[0].startswith("GET http://media.example/a HTTP/1.1")
        for host in ("169.254.169.254", "127.1", "localhost", "a.localhost", "[::1]"):
            assert await failure(f"http://{host}/", Downloader([], [])) == UNREACHABLE
        assert len(proxy.requests) == 1
