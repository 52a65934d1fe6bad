"""Messages of `application/vnd.amazon.eventstream`, as a response stream of SageMaker has them.

Source: contracts/sagemaker_hosting.md section 5.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from struct import pack
from typing import Literal
from zlib import crc32

CONTENT_TYPE = "application/vnd.amazon.eventstream"

StreamErrorCode = Literal["ModelInvocationTimeExceeded", "StreamBroken"]

_STRING = 7
_MAX_NAME, _MAX_VALUE = 255, 65535


def encode_headers(headers: Sequence[tuple[str, str]]) -> bytes:
    """The headers part of a message; every value is a string.

    Raises:
        ValueError: a name has no or more than 255 bytes, or a value more than 65535.
    """
    parts = []
    for name, value in headers:
        raw_name, raw_value = name.encode(), value.encode()
        if not 0 < len(raw_name) <= _MAX_NAME:
            raise ValueError(f"a header's name has {len(raw_name)} bytes; 1 to {_MAX_NAME} are allowed")
        if len(raw_value) > _MAX_VALUE:
            raise ValueError(f"header {name} has {len(raw_value)} bytes; at most {_MAX_VALUE} are allowed")
        parts.append(pack(">B", len(raw_name)) + raw_name + pack(">BH", _STRING, len(raw_value)) + raw_value)
    return b"".join(parts)


def encode_message(headers: bytes, payload: bytes) -> bytes:
    """A message with headers that `encode_headers` made."""
    prelude = pack(">II", 16 + len(headers) + len(payload), len(headers))
    head = prelude + pack(">I", crc32(prelude)) + headers
    return b"".join((head, payload, pack(">I", crc32(payload, crc32(head)))))


_PAYLOAD_PART = encode_headers(
    (
        (":event-type", "PayloadPart"),
        (":content-type", "application/octet-stream"),
        (":message-type", "event"),
    )
)


def payload_part(data: bytes) -> bytes:
    """A piece of the model's reply."""
    return encode_message(_PAYLOAD_PART, data)


def model_stream_error(message: str, code: StreamErrorCode) -> bytes:
    """The model failed after the first byte; nothing comes after this message."""
    return _exception("ModelStreamError", {"ErrorCode": code, "Message": message})


def internal_stream_failure(message: str) -> bytes:
    """The platform failed after the first byte; nothing comes after this message."""
    return _exception("InternalStreamFailure", {"Message": message})


def _exception(name: str, document: dict[str, str]) -> bytes:
    headers = encode_headers(
        (
            (":exception-type", name),
            (":content-type", "application/json"),
            (":message-type", "exception"),
        )
    )
    return encode_message(headers, json.dumps(document).encode())
