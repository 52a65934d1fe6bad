"""One replica: a model server whose application Ray Serve calls.

Serve runs the class below in a thread of its own that lives as long as the process, so that vLLM's fork server, which
ends with the thread that started it, can be started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from container.metrics import CONTENT_TYPE
from container.server import ModelServer, prepared
from container.settings.load import load_startup
from container.settings.settings import Startup
from deploy.ray.changes import Change, Changes, changes_adapters
from deploy.ray.metrics import merged

logger = logging.getLogger(__name__)

ADAPTERS = "adapters"
"""The actor that has the changes of adapters."""
_CHANGE_SECONDS = 600.0
"""How long the other replicas may take to load an adapter."""
_METRICS_SECONDS = 5.0
_OF_THE_CONNECTION = (b"connection", b"content-length", b"host", b"transfer-encoding")
_MODELS_STAY = (
    "on Ray Serve models are not registered, scaled or unregistered by a call, which one replica alone would get: "
    "change the model directory, or deploy another one"
)


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
        """The metrics of all replicas."""
        asked = self._all.broadcast("own_metrics").results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        return merged(dict(told for told in await asked if not isinstance(told, BaseException)))


class ReplicaApplication:
    """The ASGI application of a replica: the server's own, and what concerns all replicas."""

    def __init__(self, replica: Replica, application: Application) -> None:
        self._replica, self._application = replica, application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["raw_path"]
        if method == "GET" and path == b"/metrics":
            await _reply(send, 200, [(b"content-type", CONTENT_TYPE.encode())], await self._replica.metrics())
        elif changes_adapters(method, path):
            query = scope["query_string"]
            target = path + b"?" + query if query else path
            reply = await self._replica.change(method, target, scope["headers"], _body(receive))
            await _reply(send, reply.status_code, _without_id(scope, reply.headers.raw), reply.content)
        elif method in ("POST", "PUT", "DELETE") and _changes_models(method, path):
            body = {"code": 501, "type": "NotImplementedException", "message": _MODELS_STAY}
            await _reply(send, 501, [(b"content-type", b"application/json")], json.dumps(body).encode())
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Have the server answer. Serve does not report that a reply is complete, as ASGI has it: it is told here."""
        complete = asyncio.Event()
        whole = False

        async def received() -> Any:
            nonlocal whole
            if not whole:
                message = await receive()
                whole = not message.get("more_body")
                return message
            tasks = [asyncio.ensure_future(receive()), asyncio.ensure_future(complete.wait())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            return {"type": "http.disconnect"}

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _without_id(scope, message["headers"])
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                complete.set()

        await self._application(scope, received, sent)


def _changes_models(method: str, path: bytes) -> bool:
    parts = path.split(b"/")[1:]
    if parts[0] not in (b"models", b"workflows"):
        return False
    return len(parts) == 1 if method == "POST" else len(parts) in (2, 3)


def _without_id(scope: Any, headers: Any) -> list[tuple[bytes, bytes]]:
    """The headers without the request's id, where Serve is going to add the same."""
    own = dict(scope["headers"]).get(b"x-request-id")
    return [pair for pair in headers if pair[0] != b"x-request-id" or pair[1] != own]


async def _body(receive: Any) -> AsyncIterator[bytes]:
    while (message := await receive())["type"] == "http.request":
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


async def _reply(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    rest = [pair for pair in headers if pair[0] != b"content-length"]
    rest.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": rest})
    await send({"type": "http.response.body", "body": body})


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
