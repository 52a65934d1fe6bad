"""Multi-model endpoints: `TargetModel` names a directory, which the container loads before the first call for it.

Source: contracts/sagemaker_hosting.md section 8.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from pathlib import Path

from deploy.local.container_client import ContainerClient, read_up_to
from deploy.local.errors import MAX_ORIGINAL_MESSAGE, RuntimeApiError, model_error, validation_error

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 900.0
_UNKNOWN, _ALREADY_LOADED, _NO_MEMORY = 404, 409, 507
_ARCHIVE = ".tar.gz"


class TargetModels:
    """The models below one directory, and which of them the container has loaded."""

    def __init__(self, directory: Path, container: ContainerClient) -> None:
        self._directory = directory.resolve()
        self._container = container
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """The least recently used first."""
        self._one_at_a_time = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        """They go on when the calls that wait for them are given up, so that a slow one has its end."""

    async def path(self, endpoint: str, name: str) -> str:
        """The container's route for a target model, which is loaded now.

        Raises:
            RuntimeApiError: ValidationError, there is no such model; ModelError, the container cannot load it.
            TimeoutError: it takes the container too long.
        """
        directory = self._find(name)
        identity = _identity(name)
        if identity in self._loaded:
            self._loaded.move_to_end(identity)
        else:
            await asyncio.shield(self._loads.get(identity) or self._begin(endpoint, identity, directory))
        return f"/models/{identity}/invoke"

    def loading(self, name: str) -> bool:
        """Whether a target model is being loaded."""
        return _identity(name) in self._loads

    async def gone(self, name: str) -> bool:
        """Whether the container does not have a target model any more; if so, the next call has it loaded again."""
        identity = _identity(name)
        status, _ = await self._ask("GET", f"/models/{identity}", b"")
        if status != _UNKNOWN:
            return False
        self._loaded.pop(identity, None)
        return True

    async def close(self) -> None:
        """Wait for no load any more."""
        for load in self._loads.values():
            load.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

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

    def _begin(self, endpoint: str, identity: str, directory: Path) -> asyncio.Task[None]:
        load = asyncio.create_task(self._load(endpoint, identity, directory))
        self._loads[identity] = load

        def done(task: asyncio.Task[None]) -> None:
            del self._loads[identity]
            if not task.cancelled() and (error := task.exception()) is not None:
                # Perhaps nobody waits for it any more.
                logger.error("target model %s is not loaded: %s", directory, error or type(error).__name__)

        load.add_done_callback(done)
        return load

    async def _load(self, endpoint: str, identity: str, directory: Path) -> None:
        body = json.dumps({"model_name": identity, "url": str(directory)}).encode()
        async with self._one_at_a_time, asyncio.timeout(_LOAD_SECONDS):
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


def _identity(name: str) -> str:
    """What the container calls a target model: a hash, as on the platform."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
