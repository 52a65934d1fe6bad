"""Fetches files in parallel ranges; what it leaves behind is whole files, and a record of them.

A file is written under another name and renamed once all its bytes have come. Single ranges are tried again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from container.sources.local_copy import LocalCopy
from container.sources.progress import Progress
from container.sources.remote_file import RemoteFile
from container.sources.s3_bucket import S3Bucket, may_pass
from container.sources.source_error import FetchStopped, FetchTimeout, SourceError

logger = logging.getLogger(__name__)

THREADS = 8
_RANGE = 16 << 20
_ATTEMPTS = 6
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_GIB = 1 << 30
_MARGIN = 64 << 20
"""Bytes of the disk that a download leaves free."""
_CHECK_SECONDS = 0.2


def fetch_files(
    copy: LocalCopy,
    kind: str,
    files: Sequence[RemoteFile],
    bucket: S3Bucket,
    progress: Progress,
    seconds: float,
    stop: threading.Event,
) -> None:
    """Have `files` in the copy, which then has no others of their kind. Several processes may do so at a time.

    Args:
        copy: where they go.
        kind: "settings" or "weights": each has a lock and a record of its own.
        files: what is to be there.
        bucket: where they come from.
        progress: told of every byte.
        seconds: how long it may take, the wait for another process included.
        stop: ends it early.

    Raises:
        SourceError: S3, the disk or the time does not allow it.
        FetchStopped: `stop` was set.
    """
    deadline = time.monotonic() + seconds
    try:
        copy.directory.mkdir(parents=True, exist_ok=True)
        with _locked(copy.root / f"{kind}.lock", copy.url, deadline, stop):
            missing = _tidied(copy, kind, files)
            absent = set(missing)
            for file in files:
                if file not in absent:
                    progress.found(file.size)
            _check_space(copy, missing)
            if missing:
                _Download(copy, kind, missing, bucket, progress, stop).run(deadline, seconds)
    except OSError as error:
        raise _disk_error(error, copy) from error


@contextlib.contextmanager
def _locked(path: Path, url: str, deadline: float, stop: threading.Event) -> Iterator[None]:
    lock = FileLock(path)
    said = False
    while True:
        try:
            lock.acquire(timeout=_CHECK_SECONDS)
            break
        except Timeout:
            _check(stop, url)
            if time.monotonic() > deadline:
                raise FetchTimeout(f"{url}: another process was still downloading it when the time was up") from None
            if not said:
                said = True
                logger.info("%s: another process is downloading it; waiting for it", url)
    try:
        yield
    finally:
        lock.release()


def _tidied(copy: LocalCopy, kind: str, files: Sequence[RemoteFile]) -> tuple[RemoteFile, ...]:
    """What is missing, once all that is not wanted is gone: files that S3 has no more, and halves of a crash."""
    for stale in copy.root.glob(f"{kind}.partial.*"):
        shutil.rmtree(stale, ignore_errors=True)
    missing = copy.missing(files, kind)
    if missing:
        copy.clear_complete()
    absent, wanted = set(missing), {file.path for file in files}
    for path in copy.journal(kind).read().keys() - wanted:
        copy.clear_complete()
        copy.remove(path)
    copy.journal(kind).replace(file for file in files if file not in absent)
    return missing


def _check_space(copy: LocalCopy, missing: Sequence[RemoteFile]) -> None:
    needed = sum(file.size for file in missing)
    free = shutil.disk_usage(copy.root).free
    if needed and needed + _MARGIN > free:
        raise SourceError(
            f"{copy.url}: {needed / _GIB:.2f} GiB are to be downloaded, but {copy.root} has {free / _GIB:.2f} GiB "
            f"free; SERVING_DOWNLOAD_DIR names another place"
        )


def _is_disks(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def _disk_error(error: Exception, copy: LocalCopy) -> SourceError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(f"{copy.url}: the disk with {copy.root} is full; SERVING_DOWNLOAD_DIR names another place")
    return SourceError(f"{copy.url}: {copy.root} cannot be written: {error}; SERVING_DOWNLOAD_DIR names another place")


def _check(stop: threading.Event, url: str) -> None:
    if stop.is_set():
        raise FetchStopped(f"{url}: the download was stopped")


@dataclass(slots=True)
class _Target:
    """A file that is being written."""

    file: RemoteFile
    partial: Path
    ranges_left: int


@dataclass(frozen=True, slots=True)
class _Range:
    target: _Target
    start: int
    end: int


class _Download:
    """One download, and the threads that do it."""

    def __init__(
        self,
        copy: LocalCopy,
        kind: str,
        files: Sequence[RemoteFile],
        bucket: S3Bucket,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        self._copy, self._bucket, self._progress, self._stop = copy, bucket, progress, stop
        self._journal = copy.journal(kind)
        self._partial = Path(tempfile.mkdtemp(prefix=f"{kind}.partial.", dir=copy.root))
        self._ranges = deque(self._all_ranges(files))
        self._over = threading.Event()
        """Set when nothing more is to be read: all is there, or one has failed, or `stop` is set."""
        self._errors: list[Exception] = []
        self._finishing = threading.Lock()
        """Held by whoever changes the copy, and by who forbids that."""

    def _all_ranges(self, files: Sequence[RemoteFile]) -> Iterator[_Range]:
        for number, file in enumerate(files):
            starts = range(0, max(file.size, 1), _RANGE)
            target = _Target(file, self._partial / str(number), len(starts))
            for start in starts:
                yield _Range(target, start, min(start + _RANGE, file.size))

    def run(self, deadline: float, seconds: float) -> None:
        """Read everything. A thread that still waits for S3 when this raises ends soon, and changes nothing more."""
        threads = [
            threading.Thread(target=self._work, name=f"download-{number}", daemon=True)
            for number in range(min(THREADS, len(self._ranges)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                self._wait_for(thread, deadline, seconds)
        finally:
            with self._finishing:
                self._over.set()
            # Also where it has failed: nothing goes on with halves, and they may be all that fills the disk.
            shutil.rmtree(self._partial, ignore_errors=True)
        if self._errors:
            raise self._explained(self._errors[0])

    def _wait_for(self, thread: threading.Thread, deadline: float, seconds: float) -> None:
        while thread.is_alive():
            thread.join(_CHECK_SECONDS)
            self._progress.log(self._copy.url)
            _check(self._stop, self._copy.url)
            if time.monotonic() > deadline:
                raise FetchTimeout(
                    f"{self._copy.url}: the download took longer than {seconds:g} s; "
                    f"{self._progress.bytes / _GIB:.2f} of {self._progress.total_bytes / _GIB:.2f} GiB came, and the "
                    f"next start goes on with the files that are whole"
                )

    def _work(self) -> None:
        try:
            while not self._over.is_set() and not self._stop.is_set():
                try:
                    one = self._ranges.popleft()
                except IndexError:
                    return
                self._read(one)
        except Exception as error:
            self._errors.append(error)
            self._over.set()

    def _read(self, one: _Range) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                whole = self._read_once(one)
            except Exception as error:
                if attempt == _ATTEMPTS or _is_disks(error) or not may_pass(error):
                    raise
                if self._over.is_set():
                    return
                failure = error
            else:
                if whole:
                    self._finish(one.target)
                return
            pause = min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            logger.warning(
                "%s: %s, bytes %d to %d: %s; trying again in %.1f s",
                self._copy.url,
                one.target.file.path,
                one.start,
                one.end,
                failure,
                pause,
            )
            if self._over.wait(pause):
                return

    def _read_once(self, one: _Range) -> bool:
        """Write one range; whether it came to its end."""
        place = one.start
        try:
            descriptor = os.open(one.target.partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                for block in self._bucket.read(one.target.file, one.start, one.end):
                    if self._over.is_set() or self._stop.is_set():
                        return False
                    _write(descriptor, block, place)
                    place += len(block)
                    self._progress.read(len(block))
            finally:
                os.close(descriptor)
            if place != one.end:
                raise ConnectionError(f"{place - one.start} bytes came instead of {one.end - one.start}")
        except BaseException:
            self._progress.read(one.start - place)
            raise
        return True

    def _finish(self, target: _Target) -> None:
        with self._finishing:
            target.ranges_left -= 1
            if target.ranges_left or self._over.is_set():
                return
            self._put_in_place(target)

    def _put_in_place(self, target: _Target) -> None:
        size = target.partial.stat().st_size
        if size != target.file.size:
            raise SourceError(f"{self._copy.url}: {target.file.path} has {size} bytes instead of {target.file.size}")
        final = self._copy.directory / target.file.path
        final.parent.mkdir(parents=True, exist_ok=True)
        target.partial.replace(final)
        self._journal.add(target.file)
        self._progress.finished()

    def _explained(self, error: Exception) -> SourceError:
        if _is_disks(error):
            return _disk_error(error, self._copy)
        return self._bucket.explained(error)


def _write(descriptor: int, block: bytes, place: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(descriptor, view, place)
        place += written
        view = view[written:]
