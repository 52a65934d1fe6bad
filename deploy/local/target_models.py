"""Multi-model endpoints: `TargetModel` names a directory, which the container loads before the first call for it.

Source: contracts/sagemaker_hosting.md section 8.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from pathlib import Path

from deploy.local.container_client import ContainerClient, read_up_to
from deploy.local.errors import MAX_ORIGINAL_MESSAGE, RuntimeApiError, model_error, validation_error

_LOAD_SECONDS = 300.0
_ALREADY_LOADED, _NO_MEMORY = 409, 507
_ARCHIVE = ".tar.gz"


class TargetModels:
    """The models below one directory, and which of them the container has loaded."""

    def __init__(self, directory: Path, container: ContainerClient) -> None:
        self._directory = directory.resolve()
        self._container = container
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """The least recently used first."""
        self._loading = asyncio.Lock()

    async def path(self, endpoint: str, name: str) -> str:
        """The container's route for a target model, which is loaded now.

        Raises:
            RuntimeApiError: ValidationError, there is no such model; ModelError, the container cannot load it.
            TimeoutError: it takes the container too long.
        """
        directory = self._find(name)
        identity = hashlib.sha256(name.encode()).hexdigest()[:32]
        if identity in self._loaded:
            self._loaded.move_to_end(identity)
        else:
            async with self._loading:
                if identity not in self._loaded:
                    await self._load(endpoint, identity, directory)
        return f"/models/{identity}/invoke"

    def forget(self) -> None:
        """The container has been started again, with no model loaded."""
        self._loaded.clear()

    def _find(self, name: str) -> Path:
        """A directory of this name, or of this name without the ending of an archive."""
        for candidate in (name, name.removesuffix(_ARCHIVE)):
            directory = (self._directory / candidate.lstrip("/")).resolve()
            if directory.is_relative_to(self._directory) and directory != self._directory and directory.is_dir():
                return directory
        raise validation_error(
            f"Failed to download model data({self._directory / name.lstrip('/')}). Please ensure that there is an "
            "object located at the URL and that the role passed to CreateModel has permissions to download the model."
        )

    async def _load(self, endpoint: str, identity: str, directory: Path) -> None:
        body = json.dumps({"model_name": identity, "url": str(directory)}).encode()
        async with asyncio.timeout(_LOAD_SECONDS):
            status, answer = await self._ask("POST", "/models", body)
            while status == _NO_MEMORY and self._loaded:
                oldest, _ = self._loaded.popitem(last=False)
                await self._ask("DELETE", f"/models/{oldest}", b"")
                status, answer = await self._ask("POST", "/models", body)
        if status == _ALREADY_LOADED or 200 <= status < 300:
            self._loaded[identity] = None
            return
        raise self._failure(endpoint, status, answer)

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes | None]:
        headers = [("content-type", "application/json")]
        async with self._container.request(method, path, headers, body) as response:
            return response.status_code, await read_up_to(response, MAX_ORIGINAL_MESSAGE)

    def _failure(self, endpoint: str, status: int, answer: bytes | None) -> RuntimeApiError:
        return model_error(endpoint, status, None if answer is None else answer.decode(errors="replace"))
