"""One request of a custom rolling batch. Source: contracts/lmi.md section 7.7."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, payload_error
from handlers.contracts.protocol import Reply
from handlers.workers.batch_messages import prefixed
from handlers.workers.job import Job
from handlers.workers.parts import Part
from handlers.workers.runtime.messages import InputMessage, Properties, data_of

logger = logging.getLogger("handlers.workers")

_MAX_UNREAD = 4 * 1024 * 1024
"""Bytes that a client may leave unread. The batch waits for no client, so one beyond this is cut off."""

_ENOUGH = 128 * 1024
"""Bytes after which it is asked how far the client has come."""

_HEADER = re.compile(r"batch_([0-9]{1,9})_(.+)", re.DOTALL)


def headers_by_request(properties: Properties) -> dict[int, Properties]:
    """Properties `batch_<i>_<Header-Name>`, by request."""
    headers: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, value in properties:
        if match := _HEADER.fullmatch(name):
            headers[int(match[1])].append((match[2], value))
    return {index: tuple(pairs) for index, pairs in headers.items()}


class RollingRequest:
    """A request from the first step that has it to the last."""

    __slots__ = ("_draining", "_seed", "_unread", "job", "last", "seen")

    def __init__(self, job: Job, seed: str) -> None:
        self.job = job
        self._seed = seed
        self.seen = False
        """A step has answered for it."""
        self.last = False
        self._unread = 0
        self._draining: asyncio.Task[None] | None = None

    def entry(self, index: int) -> InputMessage:
        """Its part of a step's input: all of it the first time, empty data later."""
        if self.seen:
            return prefixed(index, InputMessage((), (("data", b""),)))
        message = self.job.message
        contents = (("data", data_of(message.contents)), ("seed", self._seed.encode()))
        return prefixed(index, InputMessage(message.properties, contents))

    def accept(self, part: Part, headers: Properties) -> None:
        """What a step has answered for it."""
        self.seen, self.last = True, part.last
        named = (("Content-Type", part.content_type),) if part.content_type else ()
        self.job.delivery.accept(part, (*named, *headers), self._write)

    def _write(self, data: bytes) -> None:
        delivery = self.job.delivery
        if self._unread > _MAX_UNREAD:
            logger.warning("a client left %s bytes unread and is cut off", self._unread)
            failure = payload_error("the client has left too much of the answer unread")
            delivery.fail(Reply(FAILED_DEPENDENCY, JSON, failure), failure)
        delivery.write(data)
        self._unread += len(data)
        if self._unread > _ENOUGH and self._draining is None and delivery.open:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self.job.delivery.writer.drain()
        self._unread = 0
        self._draining = None
