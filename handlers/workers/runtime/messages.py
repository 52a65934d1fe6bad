"""The bodies of frames: a header in JSON, then content as it is. Both sides use this module."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SIZE = struct.Struct(">I")

Properties = tuple[tuple[str, str], ...]
Contents = tuple[tuple[str | None, bytes], ...]


@dataclass(frozen=True, slots=True)
class InputMessage:
    """What becomes an `Input`."""

    properties: Properties
    contents: Contents


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMessage:
    """What an `Output` says."""

    code: int = 200
    message: str = ""
    properties: Properties = ()
    contents: Contents = ()
    streams: bool = False
    """Chunks follow."""
    error: str = ""
    """The exception's text, where the output tells of one."""

    @property
    def data(self) -> bytes:
        """The body."""
        return data_of(self.contents)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """What a worker is to serve."""

    model_dir: str
    entry_point: str
    function: str
    async_mode: bool
    properties: Properties
    """For the initializing call."""
    standing_properties: Properties
    """For every call."""


def data_of(contents: Contents) -> bytes:
    """The entry `data`, else the first, else nothing."""
    return next((value for key, value in contents if key == "data"), contents[0][1] if contents else b"")


def encode_input(message: InputMessage) -> bytes:
    """The body of a CALL."""
    return _pack({"properties": message.properties}, message.contents)


def decode_input(body: bytes) -> InputMessage:
    """The body of a CALL, read."""
    header, contents = _unpack(body)
    return InputMessage(_pairs(header["properties"]), contents)


def encode_output(message: OutputMessage) -> bytes:
    """The body of an OUTPUT, or of a STREAM_END that tells of an error."""
    header = {
        "code": message.code,
        "message": message.message,
        "properties": message.properties,
        "streams": message.streams,
        "error": message.error,
    }
    return _pack(header, message.contents)


def decode_output(body: bytes) -> OutputMessage:
    """The body of an OUTPUT, read."""
    header, contents = _unpack(body)
    return OutputMessage(
        code=header["code"],
        message=header["message"],
        properties=_pairs(header["properties"]),
        contents=contents,
        streams=header["streams"],
        error=header["error"],
    )


def encode_order(order: LoadOrder) -> bytes:
    """The body of a LOAD."""
    fields = {name: getattr(order, name) for name in LoadOrder.__slots__}
    return json.dumps(fields).encode()


def decode_order(body: bytes) -> LoadOrder:
    """The body of a LOAD, read."""
    fields = json.loads(body)
    for name in ("properties", "standing_properties"):
        fields[name] = _pairs(fields[name])
    return LoadOrder(**fields)


def _pairs(pairs: Sequence[Sequence[str]]) -> Properties:
    return tuple((name, value) for name, value in pairs)


def _pack(header: dict[str, Any], contents: Contents) -> bytes:
    header["contents"] = [(key, len(value)) for key, value in contents]
    text = json.dumps(header).encode()
    return b"".join([_SIZE.pack(len(text)), text, *(value for _, value in contents)])


def _unpack(body: bytes) -> tuple[dict[str, Any], Contents]:
    (size,) = _SIZE.unpack_from(body)
    at = _SIZE.size + size
    header = json.loads(body[_SIZE.size : at])
    contents: list[tuple[str | None, bytes]] = []
    for key, length in header["contents"]:
        contents.append((key, body[at : at + length]))
        at += length
    return header, tuple(contents)
