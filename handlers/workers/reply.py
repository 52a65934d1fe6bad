"""One call's reply on its way to the client."""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, handler_failure, payload_error
from handlers.contracts.protocol import WITHOUT_BODY, Reply
from handlers.reply import ReplyWriter
from handlers.workers.runtime.messages import OutputMessage, Properties

logger = logging.getLogger("handlers.workers")


def is_status(code: int) -> bool:
    """Whether a handler may answer with the code."""
    return 200 <= code <= 599


def invalid_status(code: int) -> Reply:
    """E3, for an output with a status that HTTP does not have."""
    return Reply(FAILED_DEPENDENCY, JSON, handler_failure(f"Invalid status code: {code}"))


def batch_failure(code: int, message: str = "Batch inference failed") -> bytes:
    """E4: a whole rolling batch has failed."""
    text = json.dumps(message, ensure_ascii=False)
    return (
        f'{{"code":{code},"message":{text},"properties":{{}},"content":{{"keys":[],"values":[]}},"cancelled":false}}'
    ).encode()


Headers = tuple[tuple[str, str], ...]

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ATTRIBUTES = re.compile(r"[\x20-\x7e]{0,1024}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
# How the reply is framed is the server's business. Handlers that echo the request's headers send these, too.
_FRAMING = frozenset(
    {
        *("connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        "upgrade",
    }
)


def response_headers(properties: Properties) -> tuple[str, Headers]:
    """The content type, empty if there is none, and the other headers.

    Left out is what cannot be sent: names that are no token, and headers that say how the reply is framed. Control
    characters are taken out of values; characters beyond Latin-1 become question marks, as LMI sends them. Custom
    attributes that SageMaker would refuse with the whole reply are left out, too (sagemaker_hosting.md section 3).
    """
    content_type = ""
    headers: dict[str, tuple[str, str]] = {}
    for name, value in properties:
        text = _CONTROL.sub(" ", value).strip().encode("latin-1", "replace").decode("latin-1")
        lower = name.lower()
        if lower == "content-type":
            content_type = text
        elif lower == _CUSTOM_ATTRIBUTES and not _ATTRIBUTES.fullmatch(text):
            logger.warning("the handler's %s is left out: it must be at most 1024 visible ASCII characters", name)
        elif _NAME.fullmatch(name) and lower not in _FRAMING:
            headers[lower] = (name, text)
    return content_type, tuple(headers.values())


_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One `binary_encode({"data", "last"[, "code", "error", "content_type"]})`."""

    data: str
    last: bool
    code: int | None = None
    error: str | None = None
    content_type: str = ""

    @property
    def status(self) -> int:
        """The status of a failure."""
        return self.code if self.code is not None and is_status(self.code) else FAILED_DEPENDENCY

    @property
    def failure(self) -> bytes:
        """E2, where there is a code."""
        code = self.status
        return f'{{"code":{code}}}'.encode() if self.error is None else payload_error(self.error, code)


def failure_of(part: Part, properties: Properties) -> Reply:
    """The reply to a call whose first part has a code."""
    content_type, headers = response_headers(properties)
    return Reply(part.status, content_type or JSON, part.failure, headers)


def decode_part(content: bytes) -> Part | None:
    """The part that content holds, None if it is something else."""
    fields = _decode_map(content)
    if fields is None or not ({"data", "last", "code"} & fields.keys()):
        return None
    code = fields.get("code", "")
    return Part(
        data=fields.get("data", ""),
        last=fields.get("last", "").lower() == "true",
        code=int(code) if code.isascii() and code.isdecimal() and len(code) < 10 else None,
        error=fields.get("error"),
        content_type=fields.get("content_type", ""),
    )


def _decode_map(content: bytes) -> dict[str, str] | None:
    """What `Output.binary_encode` has encoded; None unless all of the content is exactly that."""
    if len(content) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(content)
    at = _COUNT.size
    texts: list[str] = []
    for _ in range(2 * count):
        if at + _LENGTH.size > len(content):
            return None
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        end = at + max(length, 0)
        if end > len(content):
            return None
        try:
            texts.append(content[at:end].decode())
        except UnicodeDecodeError:
            return None
        at = end
    return dict(zip(texts[::2], texts[1::2], strict=True)) if at == len(content) else None


def reply_of(output: OutputMessage, body: bytes | None = None) -> Reply:
    """The reply that an output is: its code, its properties as headers, its content as the body."""
    if not is_status(output.code):
        return invalid_status(output.code)
    content_type, headers = response_headers(output.properties)
    data = output.data if body is None else body
    return Reply(output.code, content_type, b"" if output.code in WITHOUT_BODY else data, headers)


class Delivery:
    """Passes bytes to the writer. Status and headers go out with the first of them, so that they may still change."""

    __slots__ = ("_head", "open", "started", "writer")

    def __init__(self, writer: ReplyWriter) -> None:
        self.writer = writer
        self.open = True
        """The client waits for more."""
        self.started = False
        self._head = OutputMessage()

    def prepare(self, head: OutputMessage) -> None:
        """Status and headers of a reply that comes in parts; without effect once it has begun."""
        self._head = head
        if not is_status(head.code):
            self.reply(invalid_status(head.code))

    @property
    def head(self) -> OutputMessage:
        """What `prepare` was given."""
        return self._head

    def reply(self, reply: Reply) -> None:
        """The whole reply; what has begun is ended with its body."""
        if not self.open:
            return
        self.open = False
        if self.started:
            self.writer.end(reply.body)
        else:
            self.writer.reply(reply)

    def write(self, data: bytes) -> None:
        """A part of the body."""
        if not self.open or not data or self._head.code in WITHOUT_BODY:
            return
        if not self.started:
            self.started = True
            reply = reply_of(self._head, b"")
            self.writer.start(reply.status, reply.content_type, reply.headers)
        self.writer.write(data)

    def accept(self, part: Part, properties: Properties, write: Callable[[bytes], None]) -> None:
        """A part of an answer; one that has nothing to send adds headers only. `write` sends what is not the last."""
        if not self.started:
            merged = dict(self._head.properties) | dict(properties)
            self.prepare(OutputMessage(properties=tuple(merged.items())))
        if not part.data and not part.last:
            return
        if part.code is not None:
            self.fail(failure_of(part, self._head.properties), part.failure)
        elif part.last:
            self.end(part.data.encode())
        else:
            write(part.data.encode())

    def end(self, data: bytes = b"") -> None:
        """The last part of the body."""
        self.reply(reply_of(self._head, data))

    def fail(self, reply: Reply, midway: bytes) -> None:
        """The call has failed: `reply` if nothing was sent yet, else the body ends with `midway`."""
        if self.open and self.started:
            self.open = False
            self.writer.end(midway)
        else:
            self.reply(reply)

    def drop(self) -> None:
        """The client has gone."""
        self.open = False
