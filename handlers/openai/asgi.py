"""One call to an ASGI application in this process: a `Call` in, a `ReplyWriter` for what it sends."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

from handlers.contracts.protocol import Call, Reply
from handlers.reply import ReplyWriter

EVENTS = "text/event-stream"
_OURS = frozenset({b"content-length", b"transfer-encoding", b"x-request-id"})
_FRAMING = frozenset({"content-type", "content-length"})


def scope(call: Call, path: str, state: dict[str, Any]) -> dict[str, Any]:
    """The call as an ASGI scope. The application sees our id of the request, and so gives it to its answer."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in call.headers]
    headers = [(name, value) for name, value in headers if name not in _OURS and name != b"content-type"]
    if call.content_type:
        headers.append((b"content-type", call.content_type.encode("latin-1", "replace")))
    headers += [
        (b"content-length", str(len(call.body)).encode()),
        (b"x-request-id", call.request_id.encode("latin-1", "replace")),
    ]
    return {
        "type": "http",
        # Before 2.4 an application listens for a disconnect while it streams; later ones wait for `send` to fail,
        # which ours never does.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": urlencode(call.query).encode(),
        "headers": headers,
        "client": None,
        "server": None,
        "state": state,
    }


class AsgiExchange:
    """`receive` and `send` of one call."""

    def __init__(self, body: bytes, writer: ReplyWriter) -> None:
        self._body: bytes | None = body
        self._writer = writer
        self._gone = asyncio.Event()
        self._status = 0
        self._content_type = ""
        self._headers: tuple[tuple[str, str], ...] = ()
        self.started = self.complete = False

    @property
    def disconnected(self) -> bool:
        """The client has gone."""
        return self._gone.is_set()

    @property
    def streams_events(self) -> bool:
        """A stream of events has begun."""
        return self.started and self._content_type.partition(";")[0].strip() == EVENTS

    def disconnect(self) -> None:
        """Tell the application that the client has gone; what it sends from now on is dropped."""
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        """The body, and after it nothing but a disconnect."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Hand on what the application sends. A reply begins with its first bytes: they tell whether it streams."""
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            self._content_type = headers.get("content-type", "")
            self._headers = tuple(pair for pair in headers.items() if pair[0] not in _FRAMING)
        elif message["type"] == "http.response.body":
            self._pass_on(message.get("body", b""), last=not message.get("more_body", False))
            await self._writer.drain()

    def _pass_on(self, data: bytes, *, last: bool) -> None:
        writer = self._writer
        if last and not self.started:
            writer.reply(Reply(self._status, self._content_type, data, self._headers))
        elif last:
            writer.end(data)
        elif data:
            if not self.started:
                self.started = True
                writer.start(self._status, self._content_type, self._headers)
            writer.write(data)
        self.complete = last
