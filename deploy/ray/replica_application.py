"""The ASGI application of a replica: the server's own application, and the routes that concern all replicas."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from container.http.cross_site import KnownHosts
from container.http.router import Application, without_slashes
from container.observability.prometheus_text import CONTENT_TYPE
from container.replicated_calls import Refusal, read_adapter_call
from container.settings.settings import ServerSettings
from deploy.ray.adapter_changes import ReplicaReply, changes_adapters

_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_UNRESERVED = {
    b"%02x" % character: bytes([character])
    for character in b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
}
_MODELS_STAY = (
    "on Ray Serve models are not registered, scaled or unregistered by a call, which one replica alone would get: "
    "change the model directory, or deploy another one"
)


class ReplicaApplication:
    """The ASGI application of a replica."""

    def __init__(
        self,
        change: Callable[[str, bytes, Any, bytes], Awaitable[ReplicaReply | Refusal]],
        metrics: Callable[[], Awaitable[bytes]],
        application: Application,
        settings: ServerSettings,
    ) -> None:
        """Take the functions that reach all replicas, and the server.

        Args:
            change: Has all replicas make a change. Takes its method, target, headers and body.
            metrics: Returns the metrics of all replicas.
            application: The server's own application.
            settings: The server's settings.
        """
        self._change, self._metrics, self._application = change, metrics, application
        self._hosts = KnownHosts(settings.allowed_hosts)
        self._settings = settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return
        method, path = scope["method"], _normalized(scope["raw_path"])
        if self._hosts.fault(dict(scope["headers"])):
            await self._serve(scope, receive, send)  # The server refuses it, or serves a contract's route.
        elif method == "GET" and path in (b"/metrics", b"/server/metrics"):
            await _reply(send, 200, [(b"content-type", CONTENT_TYPE.encode())], await self._metrics())
        elif changes_adapters(method, path):
            await self._change_adapters(scope, receive, send)
        elif method in ("POST", "PUT", "DELETE") and _changes_models(method, path):
            body = {"code": 501, "type": "NotImplementedException", "message": _MODELS_STAY}
            await _reply(send, 501, [(b"content-type", b"application/json")], json.dumps(body).encode())
        else:
            await self._serve(scope, receive, send)

    async def _change_adapters(self, scope: Any, receive: Any, send: Any) -> None:
        path, query = _normalized(scope["raw_path"]), scope["query_string"]
        target = path + b"?" + query if query else path
        # Read the body before the replicas are called: a slow client must not make them wait.
        body = await read_adapter_call(scope, receive, self._settings)
        if body is None:
            return
        if isinstance(body, bytes):
            reply = await self._change(scope["method"], target, scope["headers"], body)
        else:
            reply = body
        await _reply(send, reply.status, _without_id(scope, reply.headers), reply.body)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Have the server answer.

        Serve does not report the end of a reply as a disconnection, which ASGI requires. This function reports it.
        """
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


def _normalized(path: bytes) -> bytes:
    """Decode the escapes of unreserved characters, which have the same meaning (RFC 3986, 6.2.2.2). `%2F` stays.

    Slashes at the end of LMI's paths are taken off, as the server does.
    """
    decoded = _ESCAPE.sub(lambda escape: _UNRESERVED.get(escape[1].lower(), escape[0]), path)
    return without_slashes(decoded.decode("latin-1")).encode("latin-1")


def _changes_models(method: str, path: bytes) -> bool:
    parts = path.split(b"/")[1:]
    if parts[0] not in (b"models", b"workflows"):
        return False
    return len(parts) == 1 if method == "POST" else len(parts) in (2, 3)


def _without_id(scope: Any, headers: Any) -> list[tuple[bytes, bytes]]:
    """Return the headers without the request's id if Serve will add the same id."""
    own = dict(scope["headers"]).get(b"x-request-id")
    return [pair for pair in headers if pair[0] != b"x-request-id" or pair[1] != own]


async def _reply(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    rest = [pair for pair in headers if pair[0] != b"content-length"]
    rest.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": rest})
    await send({"type": "http.response.body", "body": body})
