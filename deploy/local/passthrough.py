"""Requests that go to the container as they are, and come back as they are."""

from __future__ import annotations

from collections.abc import Iterable

from container.settings import ServerSettings
from deploy.local.asgi import Receive, Scope, Send, read_body, send_reply, unless_gone
from deploy.local.container_client import ContainerBroken, ContainerBusy, ContainerClient, ContainerUnreachable
from deploy.local.parameters import Headers

MAX_BODY = ServerSettings().max_request_size
"""Bytes of a request, as many as the container takes unless told otherwise."""

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_NOT_SENT = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"authorization"}
"""`Authorization`: on the platform it is spent on the way; the container asks for none."""


class Passthrough:
    """A plain proxy in front of the container."""

    def __init__(self, container: ContainerClient) -> None:
        self._container = container

    async def __call__(self, scope: Scope, receive: Receive, send: Send, raw_path: bytes | None = None) -> None:
        """Serve a request; `raw_path` takes the place of its own.

        Raises:
            RuntimeApiError: ValidationError with status 413, the body is too large.
            ClientGone: the client went away while it sent it.
        """
        body = await read_body(dict(scope["headers"]), receive, MAX_BODY)
        path: bytes = scope["raw_path"] if raw_path is None else raw_path
        query: bytes = scope["query_string"]
        target = (path + b"?" + query if query else path).decode("ascii", "replace")
        await unless_gone(receive, self._forward(scope, target, body, send))

    async def _forward(self, scope: Scope, target: str, body: bytes, send: Send) -> None:
        headers = [(name.decode(), value.decode("latin-1")) for name, value in _without(scope["headers"], _NOT_SENT)]
        begun = False
        try:
            async with self._container.request(scope["method"], target, headers, body) as response:
                kept = _without(response.headers.raw, _HOP_BY_HOP)
                await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
                begun = True
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (ContainerUnreachable, ContainerBusy) as error:
            await _bad_gateway(send, 503, f"the container cannot be reached: {error}\n")
        except ContainerBroken as error:
            if begun:
                raise  # the connection is all that can tell the client now: the server drops it
            await _bad_gateway(send, 502, f"the container broke the connection off: {error}\n")


def _without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> Headers:
    lowered = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in lowered if name not in names]


async def _bad_gateway(send: Send, status: int, text: str) -> None:
    await send_reply(send, status, [(b"content-type", b"text/plain; charset=utf-8")], text.encode())
