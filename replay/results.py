"""The results of a replay: a file with one JSON line for each request. A later run can continue the file."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from replay.comparison import Difference, Kind
from replay.request import RecordedRequest, Reply

FILE = "results.jsonl"
_KEPT_BODY = 65536  # The maximum number of bytes of a body to keep.


class CannotResume(Exception):
    """The output directory cannot be used, or its run cannot be continued. The message states the reason."""


class Found(msgspec.Struct, frozen=True, omit_defaults=True):
    """A difference of a request, with the name of its explanation."""

    kind: str
    where: str
    old: str
    new: str
    explanation: str | None = None


class Side(msgspec.Struct, frozen=True, omit_defaults=True):
    """The figures of the old or the new reply."""

    status: int = 0
    bytes: int = 0
    seconds: float | None = None
    first_byte: float | None = None
    failure: str = ""  # The reason for a missing reply.


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a request."""

    key: str
    id: str
    place: str
    route: str
    new: Side
    old: Side | None = None
    differences: tuple[Found, ...] = ()
    similarity: float | None = None
    greedy: bool = False
    compared: bool = False  # Whether there were two answers to compare.
    # The bodies of the request and of both answers, if the answers differ and the run does not redact texts.
    bodies: dict[str, Any] | None = None

    @property
    def failed(self) -> bool:
        """True if one of the servers gave no answer."""
        return bool(self.new.failure or (self.old is not None and self.old.failure))


class _Header(msgspec.Struct, frozen=True):
    """The first line: the options of the run. A later run has to use the same options."""

    replay: dict[str, Any]


_decode = msgspec.json.Decoder(Result).decode
_decode_header = msgspec.json.Decoder(_Header).decode


def side_of(reply: Reply | None, failure: str = "") -> Side:
    """Return the figures of a reply."""
    if reply is None:
        return Side(failure=failure)
    return Side(reply.status, len(reply.body), reply.seconds, reply.first_byte)


def shown(difference: Difference, explanation: str | None, *, redact: bool) -> Found:
    """Return a difference in the form in which it is stored.

    Args:
        explanation: The name of the difference's explanation.
        redact: Whether to leave out texts.
    """
    old, new = difference.old, difference.new
    if redact and (difference.is_text or difference.kind is Kind.TEXT):
        old, new = _redacted(old), _redacted(new)
    return Found(difference.kind.value, difference.where, old, new, explanation)


def _redacted(text: str) -> str:
    return text if text in ("absent", "present", "null") else f"({len(text)} characters)"


def bodies(request: RecordedRequest, old: Reply | None, new: Reply | None) -> dict[str, Any]:
    """Return the bodies of a request and its answers, as text."""
    found = {"request": request.body, "old": b"" if old is None else old.body, "new": b"" if new is None else new.body}
    return {name: _text(body) for name, body in found.items()}


def _text(body: bytes) -> str:
    kept = body[:_KEPT_BODY]
    more = f"... ({len(body)} bytes)" if len(body) > len(kept) else ""
    try:
        return kept.decode(errors="strict" if not more else "ignore") + more
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(kept).decode()}{more}"


@dataclass(slots=True)
class ResultFile:
    """The file of results. Only its owner can read it, because it may contain prompts."""

    path: Path
    _file: IO[bytes] = field(init=False)

    def create(self, options: Mapping[str, Any]) -> None:
        self._file = _open(self.path)
        self._write(_Header(dict(options)))

    def resume(self, options: Mapping[str, Any]) -> Iterator[Result]:
        """Yield the earlier results, and continue the file after them.

        Requests without an answer are left out, so that they are sent again. A truncated last line is also left out.

        Raises:
            CannotResume: The earlier run had other options, or the file is damaged.
        """
        try:
            earlier = self.path.open("rb")
        except OSError as error:
            raise CannotResume(f"{self.path} cannot be read: {error.strerror}") from None
        renewed = self.path.with_suffix(".new")
        with earlier:
            self._check(earlier.readline(), options)
            self._file = _open(renewed)
            self._write(_Header(dict(options)))
            for number, line in enumerate(earlier, 2):
                if not line.endswith(b"\n"):
                    break
                try:
                    result = _decode(line)
                except msgspec.DecodeError as error:
                    raise CannotResume(f"{self.path}:{number} is no result: {error}") from None
                if not result.failed:
                    self._file.write(line)
                    yield result
        self._file.flush()
        os.replace(renewed, self.path)

    def _check(self, line: bytes, options: Mapping[str, Any]) -> None:
        try:
            before = _decode_header(line).replay
        except msgspec.DecodeError:
            raise CannotResume(f"{self.path}:1 has no options of a replay") from None
        now = json.loads(json.dumps(options))
        for name in sorted(now.keys() | before.keys()):
            if now.get(name) != before.get(name):
                both = (
                    f"{name} is {json.dumps(now.get(name))}, and was {json.dumps(before.get(name))} in the earlier run"
                )
                raise CannotResume(f"{both}; --resume continues a run with the same options")

    def add(self, result: Result) -> None:
        self._write(result)

    def _write(self, line: Any) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()  # If the run is killed, it can be resumed.

    def close(self) -> None:
        self._file.close()


def _open(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
