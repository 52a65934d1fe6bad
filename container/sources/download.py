"""A local copy of a remote model.

The copy is made in two steps. The small files with settings and code are downloaded first. The weights are downloaded
later, when the server is already listening. A file is downloaded under a temporary name, and renamed once it is
complete and checked.
Each URL has its own folder in the cache directory:

    models/<hash of the URL>/model/<last part of the URL>/   the files
    models/<hash of the URL>/listing                         path, size and ETag of all files, as S3 listed them
    models/<hash of the URL>/lock                            held by the process that changes any of these

Each file below `model/` is complete and has the version in the listing. Some files may still be missing.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from container.sources.location import SETTINGS_SECONDS, FetchTimeout, S3Url, SourceError
from container.sources.s3 import RemoteFile, S3Folder, selected
from engines.cache_dir import cache_dir, is_writable

logger = logging.getLogger(__name__)

_ON_SAGEMAKER = Path("/opt/ml/.sagemaker_infra/endpoint-metadata.json")
_GIB = 1 << 30
_MARGIN = 64 << 20  # The number of bytes that a download leaves free on the disk.
_CHECK_SECONDS = 0.1
_LOG_SECONDS = 5.0


class RemoteModel:
    """A model on S3 whose small files are on this machine. `open_model` creates it."""

    def __init__(self, copy: LocalCopy, folder: S3Folder | None, files: tuple[RemoteFile, ...]) -> None:
        """Create the remote model.

        Args:
            folder: The folder on S3. None if no request to S3 is allowed.
        """
        self.url = copy.url
        self.directory = copy.directory
        self._copy, self._folder, self._files = copy, folder, files
        self._weights = tuple(file for file in files if file.is_weights)
        self._progress = DownloadProgress(self._weights)

    @property
    def bytes_here(self) -> int:
        return self._progress.bytes

    @property
    def total_bytes(self) -> int:
        return self._progress.total_bytes

    def fetch_weights(self, seconds: float, stop: threading.Event | None = None) -> None:
        if self._folder is None or self._copy.is_complete(self._files):
            self._progress.add(self.total_bytes)
            logger.info("%s is in %s already", self.url, self.directory)
            return
        started, size = time.monotonic(), self.total_bytes / _GIB
        logger.info(
            "downloading %s: %d files of weights, %.2f GiB, to %s", self.url, len(self._weights), size, self.directory
        )
        _Download(self._copy, self._folder, self._progress, seconds, stop).run(self._weights, self._files)
        if not self._copy.is_complete(self._files):
            raise SourceError(f"{self.url}: it was changed while it was downloaded; start again")
        logger.info("downloaded %s in %.1f s", self.url, time.monotonic() - started)


class RemoteModels:
    """The remote models in the settings of one model. Each URL is opened once."""

    def __init__(self, downloads: Path, *, offline: bool) -> None:
        self._downloads, self._offline = downloads, offline
        self._opened: dict[S3Url, RemoteModel] = {}

    def open(self, url: str) -> Path:
        """Return the local directory of a model. Its weights are fetched later.

        Raises:
            SourceError: See `open_model`.
        """
        key = S3Url.parse(url)
        if key not in self._opened:
            self._opened[key] = open_model(url, self._downloads, offline=self._offline)
        return self._opened[key].directory

    def has(self, url: str) -> bool:
        try:
            return S3Url.parse(url) in self._opened
        except SourceError:
            return False

    @property
    def opened(self) -> tuple[RemoteModel, ...]:
        return tuple(self._opened.values())


def open_model(url: str, downloads: Path, *, offline: bool = False) -> RemoteModel:
    """List the files of the model at `url` (`s3://bucket/prefix/`) and fetch all files except the weights.

    This function blocks for seconds.

    Args:
        offline: Use the local copy, and send no request.

    Raises:
        SourceError: There is no such model, or it cannot be reached, read or stored.
    """
    place = S3Url.parse(url)
    copy = LocalCopy(place, downloads)
    if offline:
        if not (files := copy.complete_files()):
            raise SourceError(f"{place}: no whole copy is here ({copy.root}), and DJL_OFFLINE forbids to fetch one")
        return RemoteModel(copy, None, files)
    folder = S3Folder(place)
    files = selected(folder.files())
    if not copy.is_complete(files):
        small = tuple(file for file in files if not file.is_weights)
        _Download(copy, folder, DownloadProgress(small), SETTINGS_SECONDS).run(small, files)
    return RemoteModel(copy, folder, files)


def download_dir(environ: Mapping[str, str]) -> Path:
    """Return the cache directory for models from S3.

    SERVING_DOWNLOAD_DIR takes precedence over DJL_CACHE_DIR. If neither is set, the directory is /tmp/slipway on
    SageMaker, because /tmp is on the large disk. Otherwise it is the user's cache directory.
    """
    for name in ("SERVING_DOWNLOAD_DIR", "DJL_CACHE_DIR"):
        if given := environ.get(name):
            return Path(os.path.abspath(given))
    if _ON_SAGEMAKER.exists() and is_writable(Path("/tmp/slipway")):
        return Path("/tmp/slipway")
    return cache_dir(environ)


class LocalCopy:
    """The local copy of one URL. Changes require the lock."""

    def __init__(self, url: S3Url, downloads: Path) -> None:
        self.url = str(url)
        key = hashlib.sha256(self.url.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self.root = downloads / "models" / key
        self.directory = self.root / "model" / (url.name if url.name not in (".", "..") else "model")
        self.lock = self.root / "lock"
        self._listing = self.root / "listing"

    def missing(self, files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
        """Return the files that are missing, incomplete, or of another version than on S3."""
        listed = set(self._listed())
        return tuple(file for file in files if file not in listed or not self._has(file))

    def is_complete(self, files: Sequence[RemoteFile]) -> bool:
        """Return True if the copy's listing has exactly these files, and if none of the files is missing."""
        return set(files) == set(self._listed()) and not self.missing(files)

    def complete_files(self) -> tuple[RemoteFile, ...]:
        """Return the files in the listing. If a file is missing, return an empty tuple."""
        files = self._listed()
        return () if self.missing(files) else files

    def begin(self, files: Sequence[RemoteFile]) -> None:
        """Write a listing of the wanted files, and remove all other files.

        Partial files are removed too. The processes that wrote them have died, because this process has the lock.
        """
        for stale in self.root.glob("partial.*"):
            shutil.rmtree(stale, ignore_errors=True)
        listed = self._listed()
        if not listed:
            shutil.rmtree(self.directory, ignore_errors=True)  # Without a listing, the version of the files is unknown.
        for gone in set(listed).difference(files):
            place = self.directory / gone.path
            place.unlink(missing_ok=True)
            self._remove_empty(place.parent)  # A wanted file may have the name of this directory.
        partial = self.root / "partial.listing"
        partial.write_bytes(msgspec.json.encode(files))
        partial.replace(self._listing)

    def _remove_empty(self, directory: Path) -> None:
        while directory != self.directory:
            try:
                directory.rmdir()
            except OSError:  # The directory is not empty, or does not exist.
                return
            directory = directory.parent

    def put(self, file: RemoteFile, downloaded: Path) -> None:
        place = self.directory / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        downloaded.replace(place)

    def _listed(self) -> tuple[RemoteFile, ...]:
        try:
            return msgspec.json.decode(self._listing.read_bytes(), type=tuple[RemoteFile, ...])
        except (FileNotFoundError, msgspec.DecodeError):
            return ()
        except OSError as error:
            raise self.disk_error(error) from error

    def disk_error(self, error: OSError) -> SourceError:
        """Return the error for a directory that cannot be used."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"the disk with {self.root} is full" if full else f"{self.root} cannot be used: {error}"
        return SourceError(f"{self.url}: {what}; SERVING_DOWNLOAD_DIR names another place")

    def _has(self, file: RemoteFile) -> bool:
        try:
            return (self.directory / file.path).stat().st_size == file.size
        except OSError:
            return False


class DownloadProgress:
    """The number of downloaded bytes, for the log and for /metrics. Any thread may call `add`."""

    def __init__(self, files: Sequence[RemoteFile]) -> None:
        self.total_bytes = sum(file.size for file in files)
        self.bytes = 0
        self._lock = threading.Lock()
        self._logged, self._bytes_logged = time.monotonic(), 0

    def add(self, size: int) -> None:
        """Count downloaded bytes. `size` is negative if bytes have to be downloaded again."""
        with self._lock:
            self.bytes += size

    def log(self, url: str) -> None:
        now = time.monotonic()
        elapsed = now - self._logged
        if elapsed < _LOG_SECONDS:
            return
        rate = (self.bytes - self._bytes_logged) / elapsed
        self._logged, self._bytes_logged = now, self.bytes
        rest = f"about {(self.total_bytes - self.bytes) / rate:.0f} s left" if rate > 0 else "nothing came"
        size = f"{self.bytes / _GIB:.2f} of {self.total_bytes / _GIB:.2f} GiB, {rate / _GIB:.3f} GiB/s"
        logger.info("%s: %s, %s", url, size, rest)


class _Download:
    """One download into a local copy. If several processes start the download, one downloads and the others wait."""

    def __init__(
        self,
        copy: LocalCopy,
        folder: S3Folder,
        progress: DownloadProgress,
        seconds: float,
        stop: threading.Event | None = None,
    ) -> None:
        self._copy, self._folder, self._progress = copy, folder, progress
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._stop = stop or threading.Event()

    def run(self, files: Sequence[RemoteFile], wanted: Sequence[RemoteFile]) -> None:
        """Fetch the missing files among `files`.

        Args:
            files: The files to fetch.
            wanted: All files of the model. Any other file is removed.

        Raises:
            SourceError: S3 or the disk has an error, the time limit is exceeded, or `stop` was set.
        """
        try:
            self._copy.directory.mkdir(parents=True, exist_ok=True)
            with FileLock(self._copy.lock, timeout=self._seconds):
                self._check()
                self._copy.begin(wanted)
                missing = self._copy.missing(files)
                self._progress.add(sum(file.size for file in set(files).difference(missing)))
                if missing:
                    self._check_space(missing)
                    self._fetch(missing)
        except Timeout:
            raise FetchTimeout(
                f"{self._copy.url}: another process has not downloaded it in {self._seconds:g} s"
            ) from None
        except OSError as error:
            raise self._copy.disk_error(error) from error

    def _fetch(self, files: Sequence[RemoteFile]) -> None:
        partial = Path(tempfile.mkdtemp(prefix="partial.", dir=self._copy.root))
        try:
            with self._folder.transfers(self._progress.add) as begin:
                paths = {file: partial / str(number) for number, file in enumerate(files)}
                running = {file: begin(file, path) for file, path in paths.items()}
                while running:
                    self._check()
                    self._progress.log(self._copy.url)
                    ended = [file for file, future in running.items() if future.done()]
                    for file in ended:
                        self._folder.check(file, running.pop(file), paths[file], self._check)
                        self._copy.put(file, paths[file])
                    if not ended:
                        self._stop.wait(_CHECK_SECONDS)
        finally:
            # Partial files are removed even after a failure: no later download uses them, and they may fill the disk.
            shutil.rmtree(partial, ignore_errors=True)

    def _check(self) -> None:
        if self._stop.is_set():
            raise SourceError(f"{self._copy.url}: the download was stopped")
        if time.monotonic() > self._deadline:
            came, total = self._progress.bytes / _GIB, self._progress.total_bytes / _GIB
            raise FetchTimeout(
                f"{self._copy.url}: the download took longer than {self._seconds:g} s; {came:.2f} of {total:.2f} "
                f"GiB came, and the next start keeps the files that are complete"
            )

    def _check_space(self, missing: Sequence[RemoteFile]) -> None:
        needed = sum(file.size for file in missing)
        free = shutil.disk_usage(self._copy.root).free
        if needed and needed + _MARGIN > free:
            raise SourceError(
                f"{self._copy.url}: {needed / _GIB:.2f} GiB are to be downloaded, but {self._copy.root} has "
                f"{free / _GIB:.2f} GiB free; SERVING_DOWNLOAD_DIR names another place"
            )
