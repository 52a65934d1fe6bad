"""The calls that change adapters: each replica carries all of them out, in order, those that start later too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote

import httpx

from container.http.cross_site import passed_on

logger = logging.getLogger(__name__)

_PATH = re.compile(rb"(?:/models/(?P<model>[^/]+))?/adapters(?:/(?P<name>[^/]+)(?P<update>/update)?)?")
_VLLM = {b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"}
_OF_THE_CONNECTION = (b"connection", b"content-length", b"host", b"transfer-encoding")


@dataclass(frozen=True, slots=True)
class Change:
    """A call of the management API that changed an adapter."""

    method: str
    target: bytes
    """Path and query, as they were sent."""
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def adapter(self) -> tuple[str, str]:
        """The names of its model, "" where the path has none, and of the adapter."""
        path, _, query = self.target.partition(b"?")
        found = _PATH.fullmatch(path)
        model, name = found.group("model", "name") if found is not None else (None, None)
        if name is None:
            fields = dict(parse_qsl(query.decode("latin-1")))
            with contextlib.suppress(ValueError):  # the query has it all
                fields |= json.loads(self.body)
            return (model or b"").decode(), str(fields.get("lora_name") or fields.get("name"))
        return (model or b"").decode(), unquote(name.decode())

    @property
    def supersedes(self) -> bool:
        """Whether nothing of what was done to the adapter before matters any more."""
        path = _PATH.fullmatch(self.target.partition(b"?")[0])
        return path is None or not path["update"]


def changes_adapters(method: str, path: bytes) -> bool:
    """Tell whether a call is one of those."""
    return method in ("POST", "DELETE") and (path in _VLLM or _PATH.fullmatch(path) is not None)


@dataclass
class Changes:
    """All changes that still matter, by their numbers: in an actor, for all replicas, and each replica's own copy."""

    last: int = 0
    _changes: dict[int, Change] = field(default_factory=dict)

    def add(self, change: Change, number: int | None = None) -> int:
        """Add a change, as the next or with the number that it has elsewhere; return its number."""
        if change.supersedes:
            adapter = change.adapter
            self._changes = {known: old for known, old in self._changes.items() if old.adapter != adapter}
        self.last = self.last + 1 if number is None else number
        self._changes[self.last] = change
        return self.last

    def since(self, number: int) -> tuple[int, list[tuple[int, Change]]]:
        """Return the last number, and the changes after the one with this number."""
        return self.last, [(known, change) for known, change in self._changes.items() if known > number]

    def restore(self, last: int, changes: list[tuple[int, Change]]) -> None:
        """Take over what a replica has, after the process that had all of them was lost."""
        if self.last < last:
            self.last, self._changes = last, dict(changes)


class Log(Protocol):
    """The changes in their order, for all replicas."""

    async def add(self, change: Change) -> int: ...

    async def since(self, number: int) -> tuple[int, list[tuple[int, Change]]]: ...

    async def restore(self, last: int, changes: list[tuple[int, Change]]) -> None: ...


class Failure(NamedTuple):
    """A change that a replica could not carry out, and its reply."""

    number: int
    reply: httpx.Response


class ReplicaChanges:
    """Carries changes out on one replica, and has the others do the same."""

    def __init__(
        self, own: httpx.AsyncClient, log: Log, tell: Callable[[], Awaitable[list[list[Failure] | BaseException]]]
    ) -> None:
        """`own`: calls this replica. `tell`: has all replicas catch up, and returns what each could not do."""
        self._own, self._log, self._tell = own, log, tell
        self._done = Changes()
        self._failures: dict[int, Failure] = {}
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[httpx.Response]] = set()

    async def change(self, method: str, target: bytes, headers: Any, body: AsyncIterator[bytes]) -> httpx.Response:
        """Carry a change out on all replicas; return the reply, of one that cannot if there is any."""
        task = asyncio.create_task(self._change(method, target, headers, body))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)  # a client that leaves does not leave some replicas without it

    async def _change(self, method: str, target: bytes, headers: Any, body: AsyncIterator[bytes]) -> httpx.Response:
        sent = tuple((name, value) for name, value in passed_on(headers) if name not in _OF_THE_CONNECTION)
        parts: list[bytes] = []

        async def copied() -> AsyncIterator[bytes]:
            async for part in body:
                parts.append(part)
                yield part

        async with self._one_at_a_time:
            await self._catch_up()
            reply = await self._run(method, target, sent, copied())
            if not reply.is_success:
                return reply
            change = Change(method, target, sent, b"".join(parts))
            number = await self._log.add(change)
            await self._catch_up(until=number)
            self._done.add(change, number)
        for failures in await self._tell():
            if isinstance(failures, BaseException):  # a replica that is gone; the next one carries out all changes
                logger.warning("a replica cannot be told of an adapter: %s", failures)
                continue
            for failure in failures:
                if failure.number == number:
                    return failure.reply
        return reply

    async def catch_up(self) -> list[Failure]:
        """Carry out what is in the log; return what could not be done."""
        async with self._one_at_a_time:
            await self._catch_up()
            return list(self._failures.values())

    async def _catch_up(self, until: int | None = None) -> None:
        last, changes = await self._log.since(self._done.last)
        if last < self._done.last:
            await self._log.restore(*self._done.since(0))
        for number, change in changes:
            if until is not None and number >= until:
                return
            reply = await self._run(change.method, change.target, change.headers, change.body)
            self._done.add(change, number)
            if not reply.is_success:
                logger.error("adapter %s: %d: %s", change.adapter[1], reply.status_code, reply.text)
                self._failures[number] = Failure(number, reply)
        matters = dict(self._done.since(0)[1])
        self._failures = {number: failure for number, failure in self._failures.items() if number in matters}

    async def _run(self, method: str, target: bytes, headers: Any, body: Any) -> httpx.Response:
        url = self._own.base_url.copy_with(raw_path=target)
        return await self._own.request(method, url, headers=list(headers), content=body)
