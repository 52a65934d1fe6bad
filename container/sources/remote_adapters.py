"""Downloads LoRA adapters from S3."""

from __future__ import annotations

import threading
from pathlib import Path

from container.sources.download import open_model
from container.sources.location import FetchTimeout, SourceError
from engines.daemon_thread import in_daemon_thread
from engines.errors import AdapterFailed, InvalidParameter


class RemoteAdapters:
    """Downloads the adapters of one model. Implements `engines.adapters.AdapterDownloads`."""

    def __init__(self, seconds: float, *, offline: bool, downloads: Path) -> None:
        """Create the downloader.

        Args:
            seconds: The time limit for the weights of an adapter.
            offline: Use only files that were downloaded before.
            downloads: The directory of downloads.
        """
        self._seconds, self._offline, self._downloads = seconds, offline, downloads

    async def fetch(self, url: str) -> Path:
        stop = threading.Event()
        try:
            return await in_daemon_thread(lambda: self._fetch(url, stop))
        finally:
            stop.set()

    def _fetch(self, url: str, stop: threading.Event) -> Path:
        try:
            adapter = open_model(url, self._downloads, offline=self._offline)
        except SourceError as error:
            raise InvalidParameter("src", f"cannot be fetched: {error}") from None
        try:
            adapter.fetch_weights(self._seconds, stop)
        except FetchTimeout as error:
            raise AdapterFailed(f"{error}; option.model_loading_timeout sets the limit") from None
        except SourceError as error:
            raise AdapterFailed(str(error)) from None
        return adapter.directory
