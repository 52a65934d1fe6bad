"""A model that is on S3, and its copy here.

It comes in two parts: what settings and code are read from, at once; the weights, when the server already listens.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from container.sources.download import fetch_files
from container.sources.local_copy import LocalCopy, download_dir
from container.sources.progress import Progress
from container.sources.remote_file import RemoteFile, selected
from container.sources.s3_bucket import S3Bucket
from container.sources.s3_url import S3Url
from container.sources.source_error import SourceError

logger = logging.getLogger(__name__)

SETTINGS, WEIGHTS = "settings", "weights"
SETTINGS_SECONDS = 300.0
"""That listing a model and fetching its small files may take."""
_GIB = 1 << 30


class RemoteModel:
    """One model of S3 whose settings are here, and whose weights may be. Made by `open_model`."""

    def __init__(self, copy: LocalCopy, bucket: S3Bucket | None, files: tuple[RemoteFile, ...]) -> None:
        self.url = copy.url
        self.directory = copy.directory
        """Where its files are."""
        self._copy, self._bucket, self._files = copy, bucket, files
        self._weights = tuple(file for file in files if file.is_weights)
        self.progress = Progress(sum(file.size for file in self._weights), len(self._weights))

    def fetch_weights(self, seconds: float, stop: threading.Event | None = None) -> None:
        """Have the weights here, too; does nothing where they are. Blocks.

        Raises:
            SourceError: it is not possible, or not in so many seconds.
        """
        if self._bucket is None or self._copy.is_complete(self._files):
            for file in self._weights:
                self.progress.found(file.size)
            logger.info("%s is in %s already", self.url, self.directory)
            return
        started, before = time.monotonic(), self.progress.bytes
        logger.info(
            "downloading %s: %d files of weights, %.2f GiB, to %s",
            self.url,
            len(self._weights),
            self.progress.total_bytes / _GIB,
            self.directory,
        )
        fetch_files(self._copy, WEIGHTS, self._weights, self._bucket, self.progress, seconds, stop or threading.Event())
        self._complete()
        elapsed = max(time.monotonic() - started, 1e-3)
        logger.info(
            "downloaded %s in %.1f s, %.3f GiB/s",
            self.url,
            elapsed,
            (self.progress.bytes - before) / _GIB / elapsed,
        )

    def _complete(self) -> None:
        settings = tuple(file for file in self._files if not file.is_weights)
        if self._copy.missing(settings, SETTINGS) or self._copy.missing(self._weights, WEIGHTS):
            raise SourceError(f"{self.url}: it was changed while it was downloaded; start again")
        self._copy.set_complete(self._files)


def open_model(url: str, downloads: Path | None = None, *, offline: bool = False) -> RemoteModel:
    """The model at `url`, with everything but its weights here. Blocks for seconds.

    Args:
        url: `s3://bucket/prefix/`.
        downloads: the cache directory; None: as the environment says.
        offline: take what is here, and ask nobody.

    Raises:
        SourceError: there is no such model, or it cannot be reached, read or kept.
    """
    place = S3Url.parse(url)
    copy = LocalCopy(str(place), place.name, downloads or download_dir())
    if offline:
        if not (files := copy.completed()):
            raise SourceError(f"{place}: no whole copy is here ({copy.root}), and DJL_OFFLINE forbids to fetch one")
        return RemoteModel(copy, None, files)
    bucket = S3Bucket(place)
    files = selected(bucket.files())
    if not copy.is_complete(files):
        small = tuple(file for file in files if not file.is_weights)
        progress = Progress(sum(file.size for file in small), len(small))
        fetch_files(copy, SETTINGS, small, bucket, progress, SETTINGS_SECONDS, threading.Event())
    return RemoteModel(copy, bucket, files)


def fetch(url: str, downloads: Path | None = None, seconds: float = 3600.0) -> Path:
    """The directory with all of the model at `url`, which is downloaded unless it is here unchanged. Blocks.

    Raises:
        SourceError: it is not possible, or not in so many seconds.
    """
    model = open_model(url, downloads)
    model.fetch_weights(seconds)
    return model.directory
