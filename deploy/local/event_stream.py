"""AWS's event stream ("Event stream encoding" in the Amazon Transcribe developer guide).

Each message is its length, that of its headers, a checksum of both, the headers, the payload, and a checksum of all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from struct import pack
from zlib import crc32

CONTENT_TYPE = b"application/vnd.amazon.eventstream"
_STRING = 7
"""The type of a header's value."""


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """The headers of a message."""
    return b"".join(
        pack(">B", len(name.encode())) + name.encode() + pack(">BH", _STRING, len(value.encode())) + value.encode()
        for name, value in headers.items()
    )


def encode_message(headers: bytes, payload: bytes) -> bytes:
    """A message with headers that `encode_headers` made."""
    prelude = pack(">II", 16 + len(headers) + len(payload), len(headers))
    head = prelude + pack(">I", crc32(prelude)) + headers
    return b"".join((head, payload, pack(">I", crc32(payload, crc32(head)))))


_PAYLOAD_PART = encode_headers(
    {":event-type": "PayloadPart", ":content-type": "application/octet-stream", ":message-type": "event"}
)
_MODEL_STREAM_ERROR = encode_headers(
    {":exception-type": "ModelStreamError", ":content-type": "application/json", ":message-type": "exception"}
)


def payload_part(data: bytes) -> bytes:
    """The message for a piece of the model's reply."""
    return encode_message(_PAYLOAD_PART, data)


def model_stream_error(code: str, message: str) -> bytes:
    """The last message of a stream that fails after its first byte."""
    return encode_message(_MODEL_STREAM_ERROR, json.dumps({"ErrorCode": code, "Message": message}).encode())
