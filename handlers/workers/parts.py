"""The parts of a reply that async and rolling-batch handlers send. Source: contracts/lmi.md sections 7.1 and 7.7."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, payload_error
from handlers.contracts.protocol import Reply
from handlers.workers.errors import is_status
from handlers.workers.response_headers import response_headers
from handlers.workers.runtime.messages import Properties

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
