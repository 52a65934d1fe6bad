"""Downloads LoRA adapters from S3 and from the Hugging Face hub."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from container.sources.download import open_model
from container.sources.location import FetchTimeout, SourceError
from engines.adapters import ON_HUB
from engines.daemon_thread import in_daemon_thread
from engines.errors import AdapterFailed, InvalidParameter


class RemoteAdapters:
    """Downloads the adapters of one model. Implements `engines.adapters.AdapterDownloads`."""

    def __init__(self, seconds: float, *, offline: bool, downloads: Path) -> None:
        """Create the downloader.

        Args:
            seconds: The time limit for the weights of an adapter.
            offline: Use only files that are already downloaded.
            downloads: The directory for downloads.
        """
        self._seconds, self._offline, self._downloads = seconds, offline, downloads

    async def fetch(self, url: str) -> Path:
        stop = threading.Event()
        if url.startswith(ON_HUB):
            return await self._fetch_from_hub(url)
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

    async def _fetch_from_hub(self, url: str) -> Path:
        """Download an adapter from the hub, into the hub's own cache."""
        name, _, revision = url.removeprefix(ON_HUB).partition("@")

        def download() -> Path:
            from httpx import HTTPError
            from huggingface_hub import snapshot_download

            try:
                return Path(snapshot_download(name, revision=revision or None, local_files_only=self._offline))
            except (OSError, ValueError, HTTPError) as error:
                raise InvalidParameter("src", f"cannot be fetched from the hub: {str(error).strip()}") from None

        try:
            async with asyncio.timeout(self._seconds):
                return await in_daemon_thread(download)
        except TimeoutError:
            limit = f"{self._seconds:g} seconds (option.model_loading_timeout)"
            raise AdapterFailed(f"{name} was not fetched from the hub within {limit}") from None
