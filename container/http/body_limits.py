"""Reads request bodies within limits: the size and the time of each body, and the memory for all bodies together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from container.http.uvicorn_protocol import received_body
from container.settings.server import ServerConfig
from engines.errors import BodyTimeout as BodyTimeout  # re-exported: `BodyReader.read` raises it
from engines.errors import BodyTooLarge as BodyTooLarge
from engines.errors import Overloaded
from engines.memory.cpu_memory import machine_limits
from handlers.contract import LONG_BODY

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

LEAST_RATE = 1024  # The lowest average rate of a body after `GRACE_SECONDS`, in bytes per second.
GRACE_SECONDS = 60.0
UNCOUNTED = 64 * 1024  # Bodies of up to this many bytes are not counted in `BodyMemory`.


class BodyMemory:
    """The memory budget, in bytes, for the long bodies of all open requests."""

    def __init__(self, server_config: ServerConfig) -> None:
        """Set the limit: the setting `max_request_memory`, which by default is a quarter of this process's memory.

        The limit is never below `max_request_size`, so that one body always fits.
        """
        self.limit = server_config.max_request_memory or min(limit.total for limit in machine_limits()) // 4
        self.limit = max(self.limit, server_config.max_request_size)
        self._overload_status = server_config.throttle_error_http_code
        self.used = 0

    def take(self, size: int) -> None:
        """Reserve `size` bytes.

        Raises:
            Overloaded: Fewer than `size` bytes are left.
        """
        if self.used + size > self.limit:
            raise Overloaded(
                f"the bodies of all requests take {self.used} of {self.limit} bytes (max_request_memory); "
                "try again later",
                self._overload_status,
            )
        self.used += size

    def give_back(self, size: int) -> None:
        """Release `size` bytes."""
        self.used -= size


def announced_size(headers: Mapping[bytes, bytes]) -> int:
    """Return the size in `Content-Length`, or 0 if the header is missing or is not a number."""
    digits = headers.get(b"content-length", b"").lstrip(b"0")  # llhttp refuses numbers above 64 bits.
    return int(digits) if digits.isdigit() else 0


class BodyReader:
    """Reads the body of one request, and reserves memory for it until `let_go` is called."""

    __slots__ = ("_held", "_memory")

    def __init__(self, memory: BodyMemory | None) -> None:
        """Create the body reader.

        Args:
            memory: The budget. None if this body is not counted.
        """
        self._memory = memory
        self._held = 0

    async def read(
        self,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        limit: int,
        seconds: float,
        waits: set[asyncio.Timeout] | None = None,
    ) -> bytes | None:
        """Read the body.

        Args:
            headers: The request's headers, with names in lower case.
            receive: ASGI's callable.
            limit: The largest size, in bytes.
            seconds: The longest time to wait for the next part of the body.
            waits: The time limits of running waits. This method adds its own limit, so that a drain can end its wait.

        Returns:
            The whole body, or None if the client left while sending it.

        Raises:
            BodyTooLarge: The body is larger than `limit`.
            BodyTimeout: The body arrived too slowly, or a drain ended the wait.
            Overloaded: The memory for bodies is used up.
        """
        if announced_size(headers) > limit:
            raise _too_large(limit)
        if (whole := received_body(receive)) is not None:
            self._check_size(len(whole), limit)
            return whole
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
                    self._check_size(size, limit)
                    if not message.get("more_body", False):
                        break
                    latest = loop.time()
                    timeout.reschedule(min(latest + seconds, began + GRACE_SECONDS + size / LEAST_RATE))
                else:
                    return None
        except TimeoutError:
            if loop.time() - latest < seconds:
                raise BodyTimeout(f"the body has come at less than {LEAST_RATE} bytes a second") from None
            fault = f"nothing of the body's rest has come for {seconds:g} s (request_read_timeout)"
            raise BodyTimeout(fault) from None
        finally:
            waits.discard(timeout)
        if len(parts) == 1:
            return parts[0]
        # Joining long parts takes a while. In a thread, this does not block the event loop.
        return b"".join(parts) if size < LONG_BODY else await asyncio.to_thread(b"".join, parts)

    def _check_size(self, size: int, limit: int) -> None:
        """Check the size so far, and reserve memory for it.

        Raises:
            BodyTooLarge: The body is larger than `limit`.
            Overloaded: The memory for bodies is used up.
        """
        if size > limit:
            raise _too_large(limit)
        if size > UNCOUNTED and self._memory is not None:
            self._memory.take(size - self._held)
            self._held = size

    def let_go(self) -> None:
        """Release the memory of the body. Call this method when the request has ended."""
        if self._memory is not None:
            self._memory.give_back(self._held)
            self._held = 0


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes (max_request_size)")
