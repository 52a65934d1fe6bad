"""The calls that change adapters: every replica makes all of them, in one order, and so does one that starts later.

The leader has one change made at a time, by all replicas at once, and keeps the log of the changes that all of them
have made. A follower makes its replica's adapters those of the log.
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
_VLLM = frozenset({b"/v1/load_lora_adapter", _UNLOAD})
"""The paths that vLLM has; all others are LMI's."""

AdapterName = tuple[str, str]
"""The names of a model and of an adapter of it."""


def changes_adapters(method: str, path: bytes) -> bool:
    """Tell whether a call is one of those."""
    return method in ("POST", "DELETE") and (path in _VLLM or _PATH.fullmatch(path) is not None)


@dataclass(frozen=True, slots=True)
class Change:
    """A call of the management API that changes an adapter."""

    method: str
    target: bytes
    """Path and query, as they were sent."""
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    model: str
    """The model of a path that names none."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def adapter(self) -> AdapterName:
        """The adapter that the call names; there need be none."""
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


class Log(NamedTuple):
    """The changes that still matter, in their order."""

    version: int = 0
    """How many changes were tried, those that failed included."""
    changes: tuple[Change, ...] = ()

    def with_change(self, change: Change) -> Log:
        """Return the next version, with a change that was made."""
        adapter = change.adapter
        kept = [old for old in self.changes if not change.supersedes or old.adapter != adapter]
        return Log(self.version + 1, (*kept, change))

    def of(self, adapter: AdapterName) -> list[Change]:
        """The changes of one adapter."""
        return [change for change in self.changes if change.adapter == adapter]


class Made(NamedTuple):
    """The reply of one replica to a change."""

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


Tell = Callable[[Log, Change | None], Awaitable[list[Made | BaseException]]]
"""Has all replicas follow the log, and then make a change; returns what each of them replies, or the error that kept
it from a reply. A replica that has ended is left out."""


class Leader:
    """Has the replicas make one change at a time, and keeps the log of what they have made."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._log = Log()
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[Made | None]] = set()

    async def change(self, change: Change, known: Log) -> Made | None:
        """Have all replicas make a change, or none of them.

        Args:
            change: A client's call.
            known: The log of the replica that has got the call.

        Returns:
            The reply, which is a refusal if one of the replicas has refused; None if a replica has not replied.
        """
        task = asyncio.create_task(self._change(change, known))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)  # a client that leaves does not leave some replicas without the change

    async def _change(self, change: Change, known: Log) -> Made | None:
        async with self._one_at_a_time:
            self._recover(known)
            replies = await self._tell(self._log, change)
            made = [reply for reply in replies if isinstance(reply, Made)]
            failed = [reply for reply in replies if not isinstance(reply, Made) or not reply.is_success]
            if made and not failed:
                self._log = self._log.with_change(change)
                return made[0]
            self._log = self._log._replace(version=self._log.version + 1)
            if len(failed) < len(replies) or any(not isinstance(reply, Made) for reply in failed):
                logger.warning("adapter %s: one of the replicas has failed; the others undo the change", change.adapter)
                await self._tell(self._log, None)
            refused = [reply for reply in failed if isinstance(reply, Made)]
            return refused[0] if refused else None

    async def log(self, known: Log) -> Log:
        """Return the log, once no change is being made. `known`: the log of the replica that asks."""
        async with self._one_at_a_time:
            self._recover(known)
            return self._log

    def _recover(self, known: Log) -> None:
        """Take over the log of a replica, if this process was started in the place of one that was lost."""
        if self._log.version < known.version:
            self._log = known


class Follower:
    """Makes changes on one replica."""

    def __init__(self, own: httpx.AsyncClient, name: str, at_start: Mapping[AdapterName, str]) -> None:
        """`own`: calls this replica, whose name is `name`. `at_start`: the `src` of each adapter that it began with."""
        self._own, self._name, self._at_start = own, name, at_start
        self.log = Log()
        """What was made here."""
        self._complete = True
        self._one_at_a_time = asyncio.Lock()
        self._making: set[asyncio.Task[Made]] = set()

    @property
    def known(self) -> Log:
        """The log that a new leader may take over; an empty one if this replica could not follow all of its log."""
        return self.log if self._complete else Log()

    async def make(self, log: Log, change: Change) -> Made:
        """Follow the log, and then make a change that a client asks for."""
        task = asyncio.create_task(self._make(log, change))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        return await asyncio.shield(task)  # a leader that waits no longer does not leave half of a change

    async def _make(self, log: Log, change: Change) -> Made:
        async with self._one_at_a_time:
            await self._follow(log)
            made = await self._run(change)
            if made.is_success:
                self.log = self.log.with_change(change)
            return made

    async def follow(self, log: Log) -> None:
        """Make the adapters those of the log. What cannot be done is logged, and tried again the next time."""
        async with self._one_at_a_time:
            if log.version >= self.log.version:  # else it is older than what was made here meanwhile
                await self._follow(log)

    async def _follow(self, log: Log) -> None:
        own = self.log
        done: list[Change] = []
        complete = True
        for adapter in dict.fromkeys(change.adapter for change in (*own.changes, *log.changes)):
            made = await self._follow_for(adapter, own.of(adapter), log.of(adapter))
            complete = complete and made == log.of(adapter)
            done += made
        self.log = Log(log.version, tuple(done))
        self._complete = complete

    async def _follow_for(self, adapter: AdapterName, made: list[Change], wanted: list[Change]) -> list[Change]:
        """Make one adapter that of the log; return the changes that it has then."""
        begins_anew = bool(wanted) and wanted[0].supersedes
        if wanted[: len(made)] != made or (begins_anew and not made and adapter in self._at_start):
            if not await self._undo(adapter, to_start=not begins_anew):
                return made
            made = []
        for change in wanted[len(made) :]:
            reply = await self._run(change)
            if not reply.is_success and not (change.removes and reply.status == 404):
                logger.error("adapter %s cannot be as on the other replicas: %s", adapter[1], _shown(reply))
                break
            made = [*made, change]
        return made

    async def _undo(self, adapter: AdapterName, *, to_start: bool) -> bool:
        """Remove an adapter, and register it as it was at the start if it was there; tell whether that was done."""
        model, name = (quote(part, safe="") for part in adapter)
        path = f"/models/{model}/adapters"
        calls = [Change("DELETE", f"{path}/{name}".encode(), (), b"", adapter[0])]
        if to_start and (src := self._at_start.get(adapter)) is not None:
            order = f"{path}?name={name}&src={quote(src, safe='')}"
            calls.append(Change("POST", order.encode(), (), b"", adapter[0]))
        for call in calls:
            reply = await self._run(call)
            if not reply.is_success and not (call.removes and reply.status == 404):
                logger.error("a change of the adapter %s cannot be undone: %s", adapter[1], _shown(reply))
                return False
        return True

    async def _run(self, change: Change) -> Made:
        url = self._own.base_url.copy_with(raw_path=change.target)
        headers = list(change.headers)
        reply = await self._own.request(change.method, url, headers=headers, content=change.body)
        return Made(self._name, reply.status_code, tuple(reply.headers.raw), reply.content)


def _shown(reply: Made) -> str:
    return f"{reply.status}: {reply.body[:500].decode(errors='replace')}"
