"""Downloads the media that requests name by URL. Internal addresses are refused, except in allowed networks.

Each address is checked when a connection is made, after the name was resolved. A name that leads to an internal address
is refused, even if it led to a public address a moment before.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_CHUNK = 64 * 1024
# For each retry, the timeout is multiplied by this number, as in vLLM.
_BACKOFF = 4
_TEMPORARY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
# Internal addresses that some versions of `ipaddress` call global. The first is the address of Azure's agent on each
# machine. The second network has the corresponding address of Oracle's cloud.
_INNER: tuple[Network, ...] = (
    ipaddress.IPv4Network("168.63.129.16/32"),
    ipaddress.IPv4Network("192.0.0.0/24"),
    ipaddress.IPv6Network("64:ff9b:1::/48"),
)
# IPv6 networks whose addresses contain an IPv4 address. The number says how many bits follow the IPv4 address.
_EMBEDDING: tuple[tuple[ipaddress.IPv6Network, int], ...] = (
    (ipaddress.IPv6Network("::/96"), 0),
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
)
_RESOLVING = ThreadPoolExecutor(16, "media-names")
_RESOLVE_FLAGS = socket.AI_ADDRCONFIG
_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
FORBIDDEN_HOST = "must be from one of the hosts of option.allowed_media_domains"
UNREACHABLE = "cannot be fetched from a public address; others need option.allowed_media_networks"


class DownloadFailed(Exception):
    """The media could not be fetched. The message is for the client, and tells nothing about internal networks."""


class TooLarge(Exception):
    """The media are larger than the limit."""


def is_allowed(address: str, networks: Sequence[Network]) -> bool:
    """Return True if media are allowed from an address: a public address, or an address in one of the networks."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and (inner := _embedded(found)) is not None:
        return any(found in network for network in networks) or is_allowed(str(inner), networks)
    if any(found in network for network in networks):
        return True
    if isinstance(found, ipaddress.IPv6Address) and found.is_site_local:
        return False
    return found.is_global and not found.is_multicast and not any(found in network for network in _INNER)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    for network, bits in _EMBEDDING:
        if address in network:
            return ipaddress.IPv4Address(int(address) >> bits & 0xFFFFFFFF)
    return None


class _Resolver(AbstractResolver):
    """Resolves names in threads of its own, because a look-up may take a long time and cannot be cancelled."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        look_up = partial(socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM, flags=_RESOLVE_FLAGS)
        found = await asyncio.get_running_loop().run_in_executor(_RESOLVING, look_up)
        return [
            ResolveResult(
                hostname=host, host=_shown(address), port=int(address[1]), family=kind, proto=protocol, flags=_NUMERIC
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Do nothing, because all downloads share the threads."""


def _shown(address: tuple[Any, ...]) -> str:
    """Return an address as text, with the zone if it is a link-local IPv6 address."""
    if address[3:] and address[3]:
        return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
    return str(address[0])


class Downloader:
    """Fetches URLs for one request."""

    def __init__(
        self,
        networks: Sequence[Network],
        domains: Sequence[str],
        *,
        redirects: bool = False,
        attempts: int = 1,
    ) -> None:
        """Args:
        networks: Networks from which media are allowed, in addition to public addresses.
        domains: Hosts from which media are allowed. If empty, all hosts are allowed.
        redirects: True follows redirects, unless `domains` names the allowed hosts.
        attempts: The maximum number of requests for one URL. A request is repeated if the host is busy or too slow.
        """
        self._networks, self._domains = networks, domains
        self._redirects, self._attempts = redirects and not domains, attempts

    async def fetch(self, url: str, seconds: float, count: Callable[[int], None], most: int | None = None) -> bytes:
        """Return the body of the answer.

        Args:
            url: The URL.
            seconds: The timeout of the first attempt.
            count: Called with the size of each chunk. It may raise an error.
            most: The largest size in bytes. None means no limit.

        Raises:
            DownloadFailed: The host cannot be reached, or refuses the request.
            TooLarge: The body is larger than `most`.
        """
        try:
            target = URL(url)
            host = target.host
        except ValueError:  # The host is not a DNS name.
            host = None
        if not host or target.scheme not in ("http", "https"):
            raise DownloadFailed("must be an http, https or data URL")
        if self._domains and host not in self._domains:
            raise DownloadFailed(FORBIDDEN_HOST)
        for attempt in range(self._attempts):
            last = attempt + 1 == self._attempts
            try:
                data = await self._attempt(target, seconds * _BACKOFF**attempt, count, most, last=last)
            except TimeoutError:
                if last:
                    raise DownloadFailed("cannot be fetched: its host did not answer in time") from None
            except (aiohttp.ClientError, OSError, ValueError):
                raise DownloadFailed(UNREACHABLE) from None
            else:
                if data is not None:
                    return data
            await asyncio.sleep(_BACKOFF**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(
        self, target: URL, seconds: float, count: Callable[[int], None], most: int | None, *, last: bool
    ) -> bytes | None:
        """Return the body, or None if the host is busy and another attempt is left."""
        proxy = _proxy_for(target)
        if proxy is not None:
            self._check_for_proxy(str(target.host))
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                socket_factory=None if proxy else self._socket, force_close=True, resolver=_Resolver()
            ),
            proxy=proxy,
            timeout=aiohttp.ClientTimeout(total=seconds),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": "Slipway"},
        )
        async with session, session.get(target, allow_redirects=self._redirects) as response:
            status = response.status
            if not last and (status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _TEMPORARY):
                return None
            if status >= HTTPStatus.BAD_REQUEST:
                raise DownloadFailed(f"cannot be fetched: its host answered with status {status}")
            if status >= HTTPStatus.MULTIPLE_CHOICES:
                raise DownloadFailed("cannot be fetched: its host answered with a redirect, and none is followed")
            parts = bytearray()
            async for part in response.content.iter_chunked(_CHUNK):
                count(len(part))
                parts += part
                if most is not None and len(parts) > most:
                    raise TooLarge
            return bytes(parts)

    def _check_for_proxy(self, host: str) -> None:
        """Refuse a URL that has an internal address or names the proxy's own machine.

        Other names are not checked, because the proxy resolves them.

        Raises:
            OSError: The URL is refused.
        """
        host = host.rstrip(".")
        if host in ("localhost", "ip6-localhost") or host.endswith(".localhost"):
            raise OSError(errno.EACCES, "not a public address")
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return
        for info in found:
            self._socket(info).close()

    def _socket(self, info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
        """Make a socket for an address.

        Raises:
            OSError: Media are not allowed from this address.
        """
        family, kind, protocol, _, address = info
        if not is_allowed(str(address[0]), self._networks):
            raise OSError(errno.EACCES, "not a public address")
        return socket.socket(family, kind, protocol)


def _proxy_for(target: URL) -> str | None:
    """Return the proxy that the environment names for a URL (HTTP_PROXY, HTTPS_PROXY, NO_PROXY)."""
    proxy = urllib.request.getproxies().get(target.scheme)
    return None if urllib.request.proxy_bypass(str(target.host)) else proxy
