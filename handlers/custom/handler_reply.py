"""Sends a handler's reply to the client: the status, the headers, and a body that may come in parts."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from djl_python.wire import read_string_map
from handlers.contract import JSON, WITHOUT_BODY, Reply, ReplyWriter
from handlers.custom.worker_process.socket_protocol import Message, Properties
from handlers.djl_errors import FAILED_DEPENDENCY, handler_failure, payload_error

logger = logging.getLogger("handlers.custom")

_STATUSES = range(200, 600)
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ATTRIBUTES = re.compile(r"[\x20-\x7e]{0,1024}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
# Only the server sets these headers. They are dropped from a handler's output, which may echo the request's headers.
_FRAMING = frozenset(
    [
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)


class HandlerReply:
    """Sends a handler's output to the client.

    The status and the headers are sent with the first bytes of the body. They may change until then.
    """

    __slots__ = ("_head", "open", "started", "writer")

    def __init__(self, writer: ReplyWriter) -> None:
        self.writer = writer
        self.open = True  # Whether the client still waits for the answer, or for the rest of it.
        self.started = False
        self._head = Message()

    def prepare(self, head: Message) -> None:
        """Set the status and the headers. This has no effect after the reply has started."""
        self._head = head
        if head.code not in _STATUSES:
            self.reply(reply_of(head))

    def reply(self, reply: Reply, midway: bytes | None = None) -> None:
        """Send the whole reply, or end a body that has started.

        Args:
            reply: The reply to send if no body has started.
            midway: The last bytes of a body that has started. Default: the body of `reply`.
        """
        if not self.open:
            return
        self.open = False
        if self.started:
            self.writer.end(reply.body if midway is None else midway)
        else:
            self.writer.reply(reply)

    def write(self, data: bytes) -> None:
        if not self.open or not data or self._head.code in WITHOUT_BODY:
            return
        if not self.started:
            self.started = True
            reply = reply_of(self._head, b"")
            self.writer.start(reply.status, reply.content_type, reply.headers)
        self.writer.write(data)

    def accept(self, part: AnswerPart, properties: Properties) -> None:
        """Send a part of an answer. If a part has no data, it only adds headers."""
        if not self.started:
            merged = dict(self._head.properties) | dict(properties)
            self.prepare(Message(properties=tuple(merged.items())))
        if not part.data and not part.last:
            return
        if part.code is not None:
            status = part.code if part.code in _STATUSES else FAILED_DEPENDENCY
            body = f'{{"code":{status}}}'.encode() if part.error is None else payload_error(part.error, status)
            content_type, headers = response_headers(self._head.properties)
            self.reply(Reply(status, content_type or JSON, body, headers), body)
        elif part.last:
            self.end(part.data.encode())
        else:
            self.write(part.data.encode())

    def end(self, data: bytes = b"") -> None:
        self.reply(reply_of(self._head, data))


def reply_of(output: Message, body: bytes | None = None) -> Reply:
    """Return the reply for an output.

    The output's properties become headers. The body is `body`, or the output's content if `body` is None.
    """
    if output.code not in _STATUSES:
        return Reply(FAILED_DEPENDENCY, JSON, handler_failure(f"Invalid status code: {output.code}"))
    content_type, headers = response_headers(output.properties)
    data = output.data if body is None else body
    return Reply(output.code, content_type, b"" if output.code in WITHOUT_BODY else data, headers)


def response_headers(properties: Properties) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the content type, which may be empty, and the other headers.

    Headers about framing are left out. Headers whose names HTTP does not allow are also left out. Custom attributes are
    left out if SageMaker would refuse the whole reply because of them. Control characters in values become spaces.
    Characters that Latin-1 does not have become question marks, as in LMI.
    """
    content_type = ""
    headers: dict[str, tuple[str, str]] = {}
    for name, value in properties:
        text = _CONTROL.sub(" ", value).strip().encode("latin-1", "replace").decode("latin-1")
        lower = name.lower()
        if lower == "content-type":
            content_type = text
        elif lower == _CUSTOM_ATTRIBUTES and not _ATTRIBUTES.fullmatch(text):
            logger.warning(
                "the handler's header %s is not sent: it must have at most 1024 visible ASCII characters", name
            )
        elif _NAME.fullmatch(name) and lower not in _FRAMING:
            headers[lower] = (name, text)
    return content_type, tuple(headers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """A part of an answer.

    A handler writes it with `Output.binary_encode({"data", "last"[, "code", "error", "content_type"]})`.
    """

    data: str
    last: bool
    code: int | None = None
    error: str | None = None
    content_type: str = ""


def decode_part(content: bytes) -> AnswerPart | None:
    """Return the part that the content holds, or None if the content is not a part."""
    try:
        fields, size = read_string_map(content)
    except ValueError:
        return None
    if size != len(content) or not ({"data", "last", "code"} & fields.keys()):
        return None
    code = fields.get("code", "")
    return AnswerPart(
        data=fields.get("data", ""),
        last=fields.get("last", "").lower() == "true",
        code=int(code) if code.isascii() and code.isdecimal() and len(code) < 10 else None,
        error=fields.get("error"),
        content_type=fields.get("content_type", ""),
    )
