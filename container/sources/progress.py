"""How far a download is: for the log, and for /metrics."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_LOG_SECONDS = 5.0


class Progress:
    """Bytes and files that are there, of all that are wanted. Threads may add at a time."""

    def __init__(self, total_bytes: int, total_files: int) -> None:
        self.total_bytes, self.total_files = total_bytes, total_files
        self.bytes = 0
        """Of them, those that are on this machine."""
        self.files = 0
        self._lock = threading.Lock()
        self._logged, self._bytes_logged = time.monotonic(), 0

    def found(self, size: int) -> None:
        """A whole file was there already."""
        with self._lock:
            self.bytes += size
            self._bytes_logged += size
            self.files += 1

    def read(self, size: int) -> None:
        """So many bytes have come; negative where they have to come again."""
        with self._lock:
            self.bytes += size

    def finished(self) -> None:
        """One more file is whole."""
        with self._lock:
            self.files += 1

    def log(self, url: str) -> None:
        """Say how far it is, if it has not been said for some seconds."""
        now = time.monotonic()
        elapsed = now - self._logged
        if elapsed < _LOG_SECONDS:
            return
        rate = (self.bytes - self._bytes_logged) / elapsed
        self._logged, self._bytes_logged = now, self.bytes
        rest = f"about {(self.total_bytes - self.bytes) / rate:.0f} s left" if rate > 0 else "nothing came"
        logger.info(
            "%s: %d of %d files, %.2f of %.2f GiB, %.3f GiB/s, %s",
            url,
            self.files,
            self.total_files,
            self.bytes / _GIB,
            self.total_bytes / _GIB,
            rate / _GIB,
            rest,
        )
