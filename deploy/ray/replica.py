"""One replica: a model server whose application Ray Serve calls.

Serve runs the class below in a thread of its own that lives as long as the process, so that vLLM's fork server, which
ends with the thread that started it, can be started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
from ray import serve
from ray.exceptions import RayError

from container import logs
from container.app import Application
from container.server import ModelServer, prepared
from container.settings.load import load_startup
from container.settings.settings import Startup
from deploy.ray.asgi import ReplicaApplication
from deploy.ray.changes import Change, Changes
from deploy.ray.metrics import merged

logger = logging.getLogger(__name__)

ADAPTERS = "adapters"
"""The actor that has the changes of adapters."""
_CHANGE_SECONDS = 600.0
"""How long the other replicas may take to load an adapter."""
_METRICS_SECONDS = 5.0
_OF_THE_CONNECTION = (b"connection", b"content-length", b"host", b"transfer-encoding")


class Failure(NamedTuple):
    """A change of an adapter that a replica could not carry out, and its reply."""

    number: int
    replica: str
    reply: httpx.Response


@serve.ingress()
class Replica:
    """A model server: loaded before Serve gives it requests, healthy while its /ping is 200, stopped when drained."""

    def __init__(self, model_dir: str | None = None, model_name: str | None = None) -> None:
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._all = serve.get_deployment_handle(context.deployment, context.app_name)
        self._given = model_dir, model_name
        self._changes, self._changing = Changes(), asyncio.Lock()
        self._stop = contextlib.AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> Application:
        """Load the models; return the application that serves them."""
        model_dir, model_name = self._given
        startup = without_local_sessions(load_startup(model_dir, os.environ, command_line(model_name)))
        logging_as = startup.server.log_format, startup.server.log_level, self._name
        logs.configure(*logging_as)
        logs.configure_vllm(*logging_as)
        self._stop.enter_context(prepared(startup))
        server = ModelServer(startup)
        self._stop.push_async_callback(server.stop)
        await server.load()
        watching = asyncio.create_task(server.watch())
        self._stop.callback(watching.cancel)
        transport = httpx.ASGITransport(server.applications.main)
        self._own = httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=None)
        await self.catch_up()
        return ReplicaApplication(self, server.applications.main)

    async def __del__(self) -> None:
        await self._stop.aclose()

    async def check_health(self) -> None:
        """Raise an error while /ping is not 200; and carry out changes that this replica has missed."""
        answer = await self._own.get("/ping")
        if answer.status_code != 200:
            raise RuntimeError(f"/ping is {answer.status_code}: {answer.text}")
        with contextlib.suppress(RayError, ValueError):  # the actor is being started again
            await self.catch_up()

    # Adapters.

    async def change(self, method: str, target: bytes, headers: Any, body: AsyncIterator[bytes]) -> httpx.Response:
        """Carry out a change of an adapter on all replicas; return the reply, of the first that cannot if any."""
        sent = tuple((name, value) for name, value in headers if name not in _OF_THE_CONNECTION)
        parts: list[bytes] = []

        async def copied() -> AsyncIterator[bytes]:
            async for part in body:
                parts.append(part)
                yield part

        async with self._changing:
            await self._catch_up()
            reply = await self._run(method, target, sent, copied())
            if not reply.is_success:
                return reply
            change = Change(method, target, sent, b"".join(parts))
            number = await serve.get_deployment_actor(ADAPTERS).add.remote(change)
            await self._catch_up(until=number)
            self._changes.add(change, number)
        told = await self._all.broadcast("catch_up").results_async(timeout_s=_CHANGE_SECONDS, return_exceptions=True)
        for failures in told:
            if isinstance(failures, BaseException):  # a replica that is gone; the next one carries out all changes
                logger.warning("a replica cannot be told of an adapter: %s", failures)
                continue
            for failure in failures:
                if failure.number == number:
                    return failure.reply
        return reply

    async def catch_up(self) -> list[Failure]:
        """Carry out what others have changed; return what could not be done."""
        async with self._changing:
            return await self._catch_up()

    async def _catch_up(self, until: int | None = None) -> list[Failure]:
        actor = serve.get_deployment_actor(ADAPTERS)
        last, changes = await actor.since.remote(self._changes.last)
        if last < self._changes.last:
            await actor.restore.remote(*self._changes.since(0))
        failures: list[Failure] = []
        for number, change in changes:
            if until is not None and number >= until:
                break
            reply = await self._run(change.method, change.target, change.headers, change.body)
            self._changes.add(change, number)
            if not reply.is_success:
                logger.error("adapter %s: %d: %s", change.adapter[1], reply.status_code, reply.text)
                failures.append(Failure(number, self._name, reply))
        return failures

    async def _run(self, method: str, target: bytes, headers: Any, body: Any) -> httpx.Response:
        url = self._own.base_url.copy_with(raw_path=target)
        reply: httpx.Response = await self._own.request(method, url, headers=list(headers), content=body)
        return reply

    # Metrics.

    async def own_metrics(self) -> tuple[str, str]:
        """The name of this replica, and its metrics."""
        return self._name, (await self._own.get("/metrics")).text

    async def metrics(self) -> bytes:
        """The metrics of all replicas that tell them in time."""
        told = [await self.own_metrics()]
        try:
            asked = self._all.broadcast("own_metrics")
            told += await asked.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        except Exception as error:
            logger.warning("the metrics of other replicas are not there: %r", error)
        return merged(dict(one for one in told if not isinstance(one, BaseException)))


def command_line(model_name: str | None) -> dict[str, str]:
    """The server's keys that are given."""
    return {} if model_name is None else {"model_name": model_name}


def without_local_sessions(startup: Startup) -> Startup:
    """Return the settings with sessions off where they would be kept on one machine, which others do not see."""
    models = []
    for model in startup.models:
        settings = model.settings.model
        if settings.enable_stateful_sessions and not settings.sessions_path and not settings.sessions_s3url:
            settings = replace(settings, enable_stateful_sessions=False)
        models.append(replace(model, settings=replace(model.settings, model=settings)))
    return replace(startup, models=tuple(models))
