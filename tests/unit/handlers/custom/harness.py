"""Helpers for tests: a custom handler with real workers, and a writer that records the reply."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from handlers.contract import Call, Reply, Running
from handlers.custom.custom_handler import CustomHandler
from handlers.custom.settings import HandlerConfig, PackageConfig
from handlers.model_config import ModelConfig
from tests.stand_ins.request_headers import request_headers

MODELS = Path(__file__).parents[3] / "fixtures" / "handlers"

_numbers = itertools.count()


class Recorder:
    """Implements `ReplyWriter`. If a test clears `taking`, the client does not read."""

    def __init__(self) -> None:
        self.status = 0
        self.content_type = ""
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.streamed = False
        self.taking = asyncio.Event()
        self.taking.set()
        self.finished = asyncio.Event()
        self.progress = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def reply(self, reply: Reply) -> None:
        assert not self.status
        self.status, self.content_type, self.headers = reply.status, reply.content_type, dict(reply.headers)
        self._finish(reply.body)

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        assert not self.status
        self.status, self.content_type, self.headers, self.streamed = status, content_type, dict(headers), True

    def write(self, data: bytes) -> None:
        assert self.streamed
        assert not self.finished.is_set()
        self.parts.append(data)
        self.progress.set()

    def end(self, data: bytes) -> None:
        assert self.streamed
        self._finish(data)

    async def drain(self) -> None:
        await self.taking.wait()

    async def done(self, seconds: float = 120) -> Recorder:
        async with asyncio.timeout(seconds):
            await self.finished.wait()
        return self

    def _finish(self, data: bytes) -> None:
        assert not self.finished.is_set()
        self.parts.append(data)
        self.finished.set()


class Client:
    """A client that sends calls to a handler."""

    def __init__(self, handler: CustomHandler) -> None:
        self.handler = handler

    async def send(
        self,
        body: bytes | str = b"",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str = "",
        key_salt: str = "",
        time_limit: float | None = None,
        writer: Recorder | None = None,
    ) -> tuple[Recorder, Running]:
        call = Call(
            body=body.encode() if isinstance(body, str) else body,
            content_type=content_type,
            request_id=f"id-{next(_numbers)}",
            headers=request_headers(*(headers or {}).items()),
            query=tuple((query or {}).items()),
            key_salt=key_salt,
            time_limit=time_limit,
        )
        writer = writer or Recorder()
        return writer, await self.handler.handle(call, writer)

    async def ask(self, body: bytes | str = b"", **more: Any) -> Recorder:
        """Send a call, wait for its whole answer and return it."""
        writer, _ = await self.send(body, **more)
        return await writer.done()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.handler.pool.workers if worker.pid is not None]


def settings_for(model: str | Path, **more: Any) -> ModelConfig:
    """Return the settings of a model. `more` has fields of `HandlerConfig`, `PackageConfig` and `ModelConfig`."""
    model_dir = MODELS / model
    own = {field.name for field in dataclasses.fields(HandlerConfig)}
    entry_point = str(model_dir / "model.py")
    given: dict[str, Any] = {"entry_point": entry_point, "retry_threshold": 100}
    of_packages = {field.name for field in dataclasses.fields(PackageConfig)} & more.keys()
    given["packages"] = PackageConfig(**{key: more.pop(key) for key in of_packages})
    given |= {key: value for key, value in more.items() if key in own}
    rest: dict[str, Any] = {"predict_timeout": 120.0, "model_loading_timeout": 120.0}
    rest |= {key: value for key, value in more.items() if key not in own}
    return ModelConfig(
        name="model", model_dir=model_dir, model_id=str(model_dir), handler=HandlerConfig(**given), **rest
    )


@contextlib.asynccontextmanager
async def serving(
    model: str | Path, *, queue_size: int = 100, grace: float = 2.0, **more: Any
) -> AsyncIterator[Client]:
    """Start a handler and stop it afterwards. Check that all its processes have ended."""
    handler = CustomHandler(
        settings_for(model, **more),
        queue_size=queue_size,
        overload_status=529,
        grace=grace,
    )
    await handler.start()
    client = Client(handler)
    seen = set(client.pids)
    try:
        yield client
    finally:
        seen |= set(client.pids)
        await handler.stop()
    assert not [pid for pid in seen if alive(pid)]


def alive(pid: int) -> bool:
    """True if a process runs. A zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
