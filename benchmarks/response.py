"""Reads one HTTP/1.1 response as cheaply as Python can: counts what is in the body and keeps only its end."""

from __future__ import annotations

TAIL_BYTES = 1024


class ResponseError(Exception):
    """The server did not send a well-formed response."""


class ResponseReader:
    """Takes a response's bytes, split anywhere, until it is `complete`."""

    def __init__(self, marker: bytes = b"") -> None:
        self.status = 0
        self.keep_alive = True
        self.body_bytes = 0
        self.markers = 0
        """How often the marker has occurred in the body so far."""
        self.tail = b""
        """The end of the body."""
        self.complete = False
        self._marker = marker
        self._overlap = len(marker) - 1
        self._pending = b""
        self._chunked = False
        self._left = 0
        """Bytes still to come: of the body, or of the chunk with the line end after it."""

    def feed(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
            self._pending = b""
        at = 0
        if not self.status:
            at = self._read_head(data)
            if not self.status:
                return
        if self.complete:
            if at < len(data):
                raise ResponseError("bytes after the end of the response")
        elif self._chunked:
            self._read_chunks(data, at)
        else:
            self._read_plain(data, at)

    def _read_head(self, data: bytes) -> int:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._pending = data
            return 0
        status_line, *lines = data[:end].split(b"\r\n")
        parts = status_line.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise ResponseError(f"not an HTTP response: {status_line[:80]!r}")
        length: int | None = None
        for line in lines:
            name, _, value = line.partition(b":")
            match name.strip().lower():
                case b"content-length":
                    length = int(value)
                case b"transfer-encoding":
                    self._chunked = value.strip().lower() == b"chunked"
                case b"connection":
                    self.keep_alive = value.strip().lower() != b"close"
        if length is None and not self._chunked:
            raise ResponseError("neither Content-Length nor chunked")
        self.status = int(parts[1])
        if not self._chunked:
            self._left = length or 0
            self.complete = self._left == 0
        return end + 4

    def _read_plain(self, data: bytes, at: int) -> None:
        if len(data) - at > self._left:
            raise ResponseError("bytes after the end of the response")
        self._left -= len(data) - at
        self._take(data[at:])
        self.complete = self._left == 0

    def _read_chunks(self, data: bytes, at: int) -> None:
        pieces: list[bytes] = []
        end = len(data)
        while at < end:
            if not self._left:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    self._pending = data[at:]
                    break
                size = _chunk_size(data[at:line_end])
                if not size:
                    self._read_last_chunk(data, at, line_end)
                    break
                self._left = size + 2
                at = line_end + 2
            available = min(end - at, self._left)
            pieces.append(data[at : at + min(available, max(0, self._left - 2))])
            self._left -= available
            at += available
        if pieces:
            self._take(b"".join(pieces) if len(pieces) > 1 else pieces[0])

    def _read_last_chunk(self, data: bytes, at: int, line_end: int) -> None:
        trailer_end = data.find(b"\r\n\r\n", line_end)
        if trailer_end < 0:
            self._pending = data[at:]
            return
        if trailer_end + 4 < len(data):
            raise ResponseError("bytes after the end of the response")
        self.complete = True

    def _take(self, body: bytes) -> None:
        if not body:
            return
        self.body_bytes += len(body)
        if self._marker:
            # What is left of the marker's beginning at the end of the last piece is too short to be counted twice.
            before = self.tail[-self._overlap :] if self._overlap else b""
            self.markers += (before + body).count(self._marker)
        self.tail = (self.tail + body)[-TAIL_BYTES:]


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise ResponseError(f"not a chunk size: {line[:80]!r}") from None
