"""The models of S3 that the settings name: opened once each, so that settings and code can be read from them."""

from __future__ import annotations

from pathlib import Path

from container.sources.remote_model import RemoteModel, open_model
from container.sources.s3_url import S3Url, is_s3
from container.sources.source_error import SourceError

__all__ = ["RemoteModels", "SourceError", "is_s3"]


class RemoteModels:
    """What has been opened, by URL."""

    def __init__(self, downloads: Path, *, offline: bool) -> None:
        self._downloads, self._offline = downloads, offline
        self._opened: dict[str, RemoteModel] = {}

    def open(self, url: str) -> Path:
        """The directory of this model, whose weights are fetched later.

        Raises:
            SourceError: it cannot be had.
        """
        key = str(S3Url.parse(url))
        if key not in self._opened:
            self._opened[key] = open_model(key, self._downloads, offline=self._offline)
        return self._opened[key].directory

    def has(self, url: str) -> bool:
        """Whether it has been opened."""
        try:
            return str(S3Url.parse(url)) in self._opened
        except SourceError:
            return False

    @property
    def opened(self) -> tuple[RemoteModel, ...]:
        """All of them."""
        return tuple(self._opened.values())
