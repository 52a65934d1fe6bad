"""AWS's event stream (`application/vnd.amazon.eventstream`), which carries a streamed reply of the runtime API.

Source: "Event stream encoding" in the Amazon Transcribe developer guide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from struct import pack
from zlib import crc32

from starlette.types import Message

from deploy.local_endpoint.parameters import Api, Headers, reply_headers

CONTENT_TYPE = "application/vnd.amazon.eventstream"

_EVENT = {":event-type": "PayloadPart", ":content-type": "application/octet-stream", ":message-type": "event"}
_ERROR = {":exception-type": "ModelStreamError", ":content-type": "application/json", ":message-type": "exception"}
_STRING = 7  # The code for a header's value that is a string.


@dataclass(frozen=True, slots=True)
class EventStream:
    """The format of a reply to InvokeEndpointWithResponseStream."""

    common: Headers  # The headers of every reply of the API.

    def start(self, status: int, headers: Headers) -> Message:
        own = [(b"content-type", CONTENT_TYPE.encode()), *self.common, *reply_headers(Api.STREAM, headers)]
        return {"type": "http.response.start", "status": 200, "headers": own}

    def piece(self, data: bytes) -> bytes:
        return event_message(_EVENT, data)

    def failure(self, code: str, message: str) -> bytes:
        return event_message(_ERROR, json.dumps({"ErrorCode": code, "Message": message}).encode())


def event_message(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Return a message of an event stream.

    The message consists of these parts: its own length, the length of the headers, a checksum of both lengths, the
    headers, the payload, and a checksum of all earlier parts.
    """
    encoded = b""
    for name, value in ((name.encode(), value.encode()) for name, value in headers.items()):
        encoded += pack(">B", len(name)) + name + pack(">BH", _STRING, len(value)) + value
    prelude = pack(">II", 16 + len(encoded) + len(payload), len(encoded))
    head = prelude + pack(">I", crc32(prelude)) + encoded
    return b"".join((head, payload, pack(">I", crc32(payload, crc32(head)))))
