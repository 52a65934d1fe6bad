"""Sources of recorded requests: a file, a folder or an S3 prefix. They are read as a stream, line by line."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from replay.record_formats import Malformed, read_line
from replay.request import RecordedRequest, encodable

MAX_LINE = 128 << 20  # Bytes. A recorded call has a body of at most 64 MiB, and base64 adds a third.
_NAMES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson", ".ndjson.gz")
_S3 = "s3://"


class SourceError(Exception):
    """A source cannot be read. The message states the expected value."""


@dataclass(frozen=True, slots=True)
class MalformedLine:
    """A line, or the rest of a file, that could not be read."""

    place: str
    message: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the requests. It depends only on the requests' ids and the seed, so it is the same in each run."""

    fraction: float = 1.0
    seed: int = 0

    def has(self, request: RecordedRequest) -> bool:
        if self.fraction >= 1:
            return True
        digest = hashlib.blake2b(f"{self.seed} {request.id}".encode(errors="replace"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.fraction * 2**64


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    open: Callable[[], IO[bytes]]


@dataclass(slots=True)
class Source:
    """The requests in a file, a folder or an S3 prefix, in the order of the file names."""

    files: list[_File]
    path: str  # The path for requests whose format has no path.
    bytes_read: int = field(default=0, init=False)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def __iter__(self) -> Iterator[RecordedRequest | MalformedLine]:
        for file in self.files:
            before = self.bytes_read
            try:
                yield from self._of_file(file)
            except Exception as error:  # boto3 raises many kinds of errors, even while an object is being read.
                if not _is_of_reading(error):
                    raise
                yield MalformedLine(file.name, f"it cannot be read further: {_reason(error)}")
            self.bytes_read = before + file.size

    def _of_file(self, file: _File) -> Iterator[RecordedRequest | MalformedLine]:
        before, number = self.bytes_read, 0
        with file.open() as stored:
            counted = _Counted(stored, file.size)
            compressed = file.name.endswith(".gz")
            raw: Any = gzip.GzipFile(fileobj=counted) if compressed else counted
            lines = io.BufferedReader(raw, 1 << 16)
            while line := lines.readline(MAX_LINE + 1):
                number += 1
                place = f"{file.name}:{number}"
                if len(line) > MAX_LINE:
                    while line and not line.endswith(b"\n"):
                        line = lines.readline(MAX_LINE)
                    yield MalformedLine(place, f"the line is longer than {MAX_LINE >> 20} MiB")
                elif line.strip():
                    try:
                        yield read_line(line, place, self.path)
                    except Malformed as error:
                        yield MalformedLine(place, str(error))
                self.bytes_read = before + counted.count
            if not number and file.size:
                yield MalformedLine(file.name, "it has no line")


class _Counted(io.RawIOBase):
    """The beginning of a file, with a count of the bytes that were read.

    The replay may read a capture to which the server is writing, because the server may record the replayed requests.
    So only the bytes that the file had at the start are read.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size, self.count = file, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._size - self.count))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


def open_source(name: str, path: str, s3: Callable[[], Any]) -> Source:
    """Find the files of a source.

    Args:
        name: A file, a folder, or `s3://bucket/folder`.
        path: The path for requests whose format has no path.
        s3: Returns boto3's client.

    Raises:
        SourceError: The source cannot be read, or has no file.
    """
    files = _objects(name, s3) if name.startswith(_S3) else _paths(Path(name))
    if not files:
        raise SourceError(f"{name} has no file that ends with {', '.join(_NAMES)}")
    return Source(files, path)


def _paths(place: Path) -> list[_File]:
    try:
        if place.is_dir():
            found = sorted(path for path in place.rglob("*") if path.name.endswith(_NAMES) and path.is_file())
            return [_local(path, str(path.relative_to(place))) for path in found]
        if not place.exists():
            raise SourceError(f"there is no {place}; expected a file, a folder or s3://bucket/folder")
        place.open("rb").close()
        return [_local(place, place.name)]
    except OSError as error:
        raise SourceError(f"{place} cannot be read: {error.strerror or error}") from None


def _local(path: Path, name: str) -> _File:
    # The name of a file may not be valid UTF-8, but the file of results and the report must be.
    return _File(encodable(name), path.stat().st_size, lambda: path.open("rb"))


def _objects(name: str, s3: Callable[[], Any]) -> list[_File]:
    bucket, _, prefix = name.removeprefix(_S3).partition("/")
    if not bucket:
        raise SourceError(f"{name} names no bucket; expected s3://bucket/folder")
    files = []
    folder = f"{prefix.rstrip('/')}/" if prefix else ""
    try:
        client = s3()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for stored in page.get("Contents", ()):
                key = stored["Key"]
                if key.endswith(_NAMES) and (key == prefix or key.startswith(folder)):
                    files.append(_stored(client, bucket, key, prefix, stored["Size"]))
    except Exception as error:
        if not _is_of_reading(error):
            raise
        raise SourceError(f"{name} cannot be read: {_reason(error)}") from None
    return files


def _stored(client: Any, bucket: str, key: str, prefix: str, size: int) -> _File:
    def opened() -> IO[bytes]:
        body: IO[bytes] = client.get_object(Bucket=bucket, Key=key)["Body"]
        return body

    folder = prefix if prefix.endswith("/") else prefix.rpartition("/")[0]
    return _File(key.removeprefix(folder).lstrip("/"), size, opened)


def _is_of_reading(error: Exception) -> bool:
    """Return True if an error means that a file or an object cannot be read."""
    if isinstance(error, OSError | EOFError | zlib.error):  # This includes gzip's errors.
        return True
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    return isinstance(error, BotoCoreError | ClientError | HTTPError)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())
