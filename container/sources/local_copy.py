"""The copy of a remote model on this machine: where it is, and what of it is there.

Below the cache directory each URL has a folder of its own, named for its hash (contracts/lmi.md 2.6):

    <hash>/<last part of the URL>/   the files
    <hash>/settings, weights         what of them is whole, and the locks of those that write them
    <hash>/complete                  the list of all files, once all are there

A model that is called like one of these is one folder further down, in `<hash>/model/`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from container.sources.journal import Journal
from container.sources.remote_file import RemoteFile
from handlers.cache_dir import cache_dir, is_writable

_ON_SAGEMAKER = Path("/opt/ml/.sagemaker_infra/endpoint-metadata.json")
_NO_NAME = "model"
_RECORDS = re.compile(r"\.?(settings|weights|complete)(\..*)?", re.DOTALL)
"""What is beside the files, with locks, and with what is being written."""


def download_dir(environ: Mapping[str, str] | None = None) -> Path:
    """SERVING_DOWNLOAD_DIR > DJL_CACHE_DIR > the user's cache, or on SageMaker /tmp, which is on the large disk."""
    environ = os.environ if environ is None else environ
    for name in ("SERVING_DOWNLOAD_DIR", "DJL_CACHE_DIR"):
        if given := environ.get(name):
            return Path(os.path.abspath(given))
    if _ON_SAGEMAKER.exists() and is_writable(Path("/tmp/slipway")):
        return Path("/tmp/slipway")
    return cache_dir(environ)


def _place(name: str) -> Path:
    if name in ("", ".", ".."):
        return Path(_NO_NAME)
    return Path(_NO_NAME, name) if _RECORDS.fullmatch(name) else Path(name)


class LocalCopy:
    """What is on this machine of one URL."""

    def __init__(self, url: str, name: str, downloads: Path) -> None:
        key = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self.url = url
        self.root = downloads / "models" / key
        self.directory = self.root / _place(name)
        self._complete = Journal(self.root / "complete")

    def journal(self, kind: str) -> Journal:
        """The record of files of one kind, "settings" or "weights"."""
        return Journal(self.root / kind)

    def missing(self, files: Iterable[RemoteFile], kind: str) -> tuple[RemoteFile, ...]:
        """Those that are not there, or not whole, or in another version."""
        there = self.journal(kind).read()
        return tuple(file for file in files if there.get(file.path) != file or not self._has_size(file))

    def is_complete(self, files: tuple[RemoteFile, ...]) -> bool:
        """Whether all of these files, and no others, were there at the end of a download, and still are."""
        return bool(files) and self._complete.read() == {file.path: file for file in files} and self._all_there(files)

    def completed(self) -> tuple[RemoteFile, ...]:
        """The files of the last whole download, if nothing of it is lost; else none."""
        files = tuple(self._complete.read().values())
        return files if self._all_there(files) else ()

    def set_complete(self, files: Iterable[RemoteFile]) -> None:
        """Remember that all of these are there."""
        self._complete.replace(files)

    def clear_complete(self) -> None:
        """From now on, files change."""
        (self.root / "complete").unlink(missing_ok=True)

    def remove(self, path: str) -> None:
        """Delete a file that the source no longer has."""
        (self.directory / path).unlink(missing_ok=True)

    def _all_there(self, files: tuple[RemoteFile, ...]) -> bool:
        return all(self._has_size(file) for file in files)

    def _has_size(self, file: RemoteFile) -> bool:
        try:
            return (self.directory / file.path).stat().st_size == file.size
        except OSError:
            return False
