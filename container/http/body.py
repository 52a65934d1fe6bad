"""Reading the bodies of requests: limits in size, in time, and in memory for all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from container.settings.settings import ServerSettings
from handlers.contracts.protocol import LONG_BODY
from handlers.engines.cpu_memory import machine_limits
from handlers.errors import BodyTimeout as BodyTimeout  # for whoever reads bodies
from handlers.errors import BodyTooLarge as BodyTooLarge
from handlers.errors import Overloaded

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

LEAST_RATE = 1024
"""Bytes a second that a body has to come at, on average, once `GRACE_SECONDS` are over."""
GRACE_SECONDS = 60.0
UNCOUNTED = 64 * 1024
"""Bytes; shorter bodies are not counted against the memory for bodies."""


class BodyMemory:
    """The memory for the long bodies of all requests that are being read or answered."""

    def __init__(self, settings: ServerSettings) -> None:
        """Without a limit in the settings, bodies may take a quarter of what this process may use, and one always
        fits."""
        self.limit = settings.max_request_memory or min(limit.total for limit in machine_limits()) // 4
        self.limit = max(self.limit, settings.max_request_size)
        self._overload_status = settings.throttle_error_http_code
        self.used = 0

    def take(self, size: int) -> None:
        """Count `size` bytes. Raises Overloaded: there is no room for them."""
        if self.used + size > self.limit:
            raise Overloaded(
                f"the bodies of all requests take {self.used} of {self.limit} bytes (max_request_memory); "
                "try again later",
                self._overload_status,
            )
        self.used += size

    def give_back(self, size: int) -> None:
        self.used -= size


class BodyReader:
    """Reads the body of one request."""

    __slots__ = ("_held", "_memory", "complete")

    def __init__(self, memory: BodyMemory | None) -> None:
        """`memory`: None: it is not counted."""
        self._memory = memory
        self._held = 0
        self.complete = False
        """All of the body has been read."""

    async def read(
        self,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        limit: int,
        seconds: float,
        waits: set[asyncio.Timeout] | None = None,
    ) -> bytes | None:
        """The whole body, or None if the client went away while sending it.

        `limit`: in bytes. `seconds`: in which some of it has to come. `waits`: has the time limit of the wait while it
        lasts, so that others can end it.

        Raises:
            BodyTooLarge: there is more of it.
            BodyTimeout: it came too slowly, or the wait was ended.
            Overloaded: there is no memory for it.
        """
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        waits = set() if waits is None else waits
        parts: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        began = latest = loop.time()
        timeout = asyncio.timeout(seconds)
        waits.add(timeout)
        try:
            async with timeout:
                while (message := await receive())["type"] == "http.request":
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
                    if size > UNCOUNTED:
                        self._hold(size)
                    if not message.get("more_body", False):
                        self.complete = True
                        break
                    latest = loop.time()
                    timeout.reschedule(min(latest + seconds, began + GRACE_SECONDS + size / LEAST_RATE))
                else:
                    return None
        except TimeoutError:
            raise _too_slow(seconds, loop.time() - latest) from None
        finally:
            waits.discard(timeout)
        if len(parts) == 1:
            return parts[0]
        # Joining long parts takes a while; the interpreter goes on meanwhile.
        return b"".join(parts) if size < LONG_BODY else await asyncio.to_thread(b"".join, parts)

    def _hold(self, size: int) -> None:
        if self._memory is not None:
            self._memory.take(size - self._held)
            self._held = size

    def let_go(self) -> None:
        """Give back the memory of the body; to be called when the request has ended."""
        if self._memory is not None:
            self._memory.give_back(self._held)
            self._held = 0


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes (max_request_size)")


def _too_slow(seconds: float, since: float) -> BodyTimeout:
    if since < seconds:
        return BodyTimeout(f"the body has come at less than {LEAST_RATE} bytes a second")
    return BodyTimeout(f"nothing of the body's rest has come for {seconds:g} s (request_read_timeout)")
