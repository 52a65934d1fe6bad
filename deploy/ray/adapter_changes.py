"""Calls that change adapters: all replicas make the same changes in the same order, also replicas that start later.

The leader has one change made at a time, by all replicas at once. It keeps the log of the changes that all replicas
have made. A follower changes the adapters of its replica until they match the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

import httpx

logger = logging.getLogger(__name__)

_PATH = re.compile(rb"(?:/models/(?P<model>[^/]+))?/adapters(?:/(?P<name>[^/]+)(?P<update>/update)?)?")
_UNLOAD = b"/v1/unload_lora_adapter"
# The paths of routes that vLLM has. The other paths are LMI routes.
_VLLM = frozenset({b"/v1/load_lora_adapter", _UNLOAD})

AdapterName = tuple[str, str]  # The name of a model, and the name of one of its adapters.


def changes_adapters(method: str, path: bytes) -> bool:
    """Return True for a call that changes adapters."""
    return method in ("POST", "DELETE") and (path in _VLLM or _PATH.fullmatch(path) is not None)


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """A call of the management API that changes an adapter."""

    method: str
    target: bytes  # The path and the query, as they were sent.
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    model: str  # The model for a path that names none.
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # Distinguishes calls that are otherwise equal.

    @property
    def adapter(self) -> AdapterName:
        """The adapter that the call names. It may not exist."""
        path, _, query = self.target.partition(b"?")
        found = _PATH.fullmatch(path)
        in_path, name = found.group("model", "name") if found is not None else (None, None)
        model = self.model if in_path is None else unquote(in_path.decode())
        if name is not None:
            return model, unquote(name.decode())
        fields: Any = dict(parse_qsl(query.decode("latin-1")))
        if path in _VLLM or (self.body.strip() and self._is_json):
            with contextlib.suppress(ValueError):
                fields = json.loads(self.body)
        key = "lora_name" if path in _VLLM else "name"
        return model, str(fields.get(key)) if isinstance(fields, dict) else ""

    @property
    def removes(self) -> bool:
        """True for a call that removes the adapter."""
        return self.method == "DELETE" or self.target.partition(b"?")[0] == _UNLOAD

    @property
    def supersedes(self) -> bool:
        """True for a call after which earlier changes of the adapter do not matter."""
        path = _PATH.fullmatch(self.target.partition(b"?")[0])
        return path is None or not path["update"]

    @property
    def _is_json(self) -> bool:
        kinds = [value for name, value in self.headers if name == b"content-type"]
        return any(value.partition(b";")[0].strip().lower() == b"application/json" for value in kinds)


class ChangeLog(NamedTuple):
    """The changes that still matter, in their order."""

    version: int = 0  # The number of changes that were tried, including those that failed.
    changes: tuple[AdapterChange, ...] = ()

    def with_change(self, change: AdapterChange) -> ChangeLog:
        """Return the next version of the log, with a change that was made."""
        adapter = change.adapter
        kept = [old for old in self.changes if not change.supersedes or old.adapter != adapter]
        return ChangeLog(self.version + 1, (*kept, change))

    def of(self, adapter: AdapterName) -> list[AdapterChange]:
        """Return the changes of one adapter."""
        return [change for change in self.changes if change.adapter == adapter]


class ReplicaReply(NamedTuple):
    """The reply of one replica to a change."""

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


# Has all replicas follow the log and then make a change. Returns the reply of each replica, or the error that prevented
# a reply. A replica that has ended is left out.
Broadcast = Callable[[ChangeLog, AdapterChange | None], Awaitable[list[ReplicaReply | BaseException]]]


class Leader:
    """Has the replicas make one change at a time, and keeps the log of their changes."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._log = ChangeLog()
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[ReplicaReply | None]] = set()

    async def change(self, change: AdapterChange, known: ChangeLog) -> ReplicaReply | None:
        """Have all replicas make a change, or none of them.

        Args:
            change: A client's call.
            known: The log of the replica that has got the call.

        Returns:
            The reply. It is a refusal if a replica refused the change. None if a replica did not reply.
        """
        task = asyncio.create_task(self._change(change, known))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)  # A client that leaves must not stop a change that some replicas have made.

    async def _change(self, change: AdapterChange, known: ChangeLog) -> ReplicaReply | None:
        async with self._one_at_a_time:
            self._recover(known)
            replies = await self._broadcast(self._log, change)
            made = [reply for reply in replies if isinstance(reply, ReplicaReply)]
            failed = [reply for reply in replies if not isinstance(reply, ReplicaReply) or not reply.is_success]
            if made and not failed:
                self._log = self._log.with_change(change)
                return made[0]
            self._log = self._log._replace(version=self._log.version + 1)
            if len(failed) < len(replies) or any(not isinstance(reply, ReplicaReply) for reply in failed):
                logger.warning("adapter %s: a replica failed; the other replicas undo the change", change.adapter)
                await self._broadcast(self._log, None)
            refused = [reply for reply in failed if isinstance(reply, ReplicaReply)]
            return refused[0] if refused else None

    async def log(self, known: ChangeLog) -> ChangeLog:
        """Return the log. Wait for a change that is being made.

        Args:
            known: The log of the replica that asks.
        """
        async with self._one_at_a_time:
            self._recover(known)
            return self._log

    def _recover(self, known: ChangeLog) -> None:
        """Take over the log of a replica if this process replaces a leader that was lost."""
        if self._log.version < known.version:
            self._log = known


class Follower:
    """Makes changes on one replica."""

    def __init__(self, own: httpx.AsyncClient, name: str, at_start: Mapping[AdapterName, str]) -> None:
        """Take the replica.

        Args:
            own: A client that calls this replica.
            name: The name of this replica.
            at_start: The `src` of each adapter that was registered when the replica started.
        """
        self._own, self._name, self._at_start = own, name, at_start
        self.log = ChangeLog()  # The changes that were made here.
        self._complete = True
        self._one_at_a_time = asyncio.Lock()
        self._making: set[asyncio.Task[ReplicaReply]] = set()

    @property
    def known(self) -> ChangeLog:
        """The log that a new leader may take over. It is empty if this replica could not follow all of its log."""
        return self.log if self._complete else ChangeLog()

    async def make(self, log: ChangeLog, change: AdapterChange) -> ReplicaReply:
        """Follow the log, and then make a change that a client asks for."""
        task = asyncio.create_task(self._make(log, change))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        return await asyncio.shield(task)  # A leader that stops waiting must not stop a change halfway.

    async def _make(self, log: ChangeLog, change: AdapterChange) -> ReplicaReply:
        async with self._one_at_a_time:
            await self._follow(log)
            made = await self._run(change)
            if made.is_success:
                self.log = self.log.with_change(change)
            return made

    async def follow(self, log: ChangeLog) -> None:
        """Make the adapters match the log. A change that fails is logged, and tried again next time."""
        async with self._one_at_a_time:
            if log.version >= self.log.version:  # An older log lacks changes that were made here in the meantime.
                await self._follow(log)

    async def _follow(self, log: ChangeLog) -> None:
        own = self.log
        done: list[AdapterChange] = []
        complete = True
        for adapter in dict.fromkeys(change.adapter for change in (*own.changes, *log.changes)):
            made = await self._follow_for(adapter, own.of(adapter), log.of(adapter))
            complete = complete and made == log.of(adapter)
            done += made
        self.log = ChangeLog(log.version, tuple(done))
        self._complete = complete

    async def _follow_for(
        self, adapter: AdapterName, made: list[AdapterChange], wanted: list[AdapterChange]
    ) -> list[AdapterChange]:
        """Make one adapter match the log. Return the changes that the adapter then has."""
        begins_anew = bool(wanted) and wanted[0].supersedes
        if wanted[: len(made)] != made or (begins_anew and not made and adapter in self._at_start):
            if not await self._undo(adapter, to_start=not begins_anew):
                return made
            made = []
        for change in wanted[len(made) :]:
            reply = await self._run(change)
            if not reply.is_success and not (change.removes and reply.status == 404):
                logger.error(
                    "adapter %s cannot be made the same as on the other replicas: %s", adapter[1], _shown(reply)
                )
                break
            made = [*made, change]
        return made

    async def _undo(self, adapter: AdapterName, *, to_start: bool) -> bool:
        """Remove an adapter.

        Args:
            adapter: The adapter.
            to_start: Register the adapter again if it was registered when the replica started.

        Returns:
            True if it was done.
        """
        model, name = (quote(part, safe="") for part in adapter)
        path = f"/models/{model}/adapters"
        calls = [AdapterChange("DELETE", f"{path}/{name}".encode(), (), b"", adapter[0])]
        if to_start and (src := self._at_start.get(adapter)) is not None:
            order = f"{path}?name={name}&src={quote(src, safe='')}"
            calls.append(AdapterChange("POST", order.encode(), (), b"", adapter[0]))
        for call in calls:
            reply = await self._run(call)
            if not reply.is_success and not (call.removes and reply.status == 404):
                logger.error("a change of adapter %s cannot be undone: %s", adapter[1], _shown(reply))
                return False
        return True

    async def _run(self, change: AdapterChange) -> ReplicaReply:
        url = self._own.base_url.copy_with(raw_path=change.target)
        headers = list(change.headers)
        reply = await self._own.request(change.method, url, headers=headers, content=change.body)
        return ReplicaReply(self._name, reply.status_code, tuple(reply.headers.raw), reply.content)


def _shown(reply: ReplicaReply) -> str:
    return f"{reply.status}: {reply.body[:500].decode(errors='replace')}"
