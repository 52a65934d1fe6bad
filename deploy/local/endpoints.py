"""Which endpoints, inference components, adapters and target models there are, and where in the container they lead."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from deploy.local.container import ContainerClient, read_up_to
from deploy.local.errors import (
    ACCOUNT,
    MAX_ORIGINAL_MESSAGE,
    RuntimeApiError,
    endpoint_not_found,
    model_error,
    validation_error,
)
from deploy.local.parameters import ENDPOINT_NAME, VARIANT, Parameters
from deploy.local.settings import LocalSettings

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


_ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
_COMPONENT_MISSING = (
    "Inference Component Name header is required for endpoints to which you plan to deploy inference components. "
    "Please include Inference Component Name header or consider using SageMaker models."
)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call goes in the container."""

    path: str
    headers: tuple[tuple[str, str], ...]


class Endpoints:
    """All that can be invoked."""

    def __init__(self, settings: LocalSettings, container: ContainerClient) -> None:
        self._settings = settings
        self.target_models = TargetModels(settings.models_dir, container) if settings.models_dir is not None else None

    def check_name(self, name: str) -> None:
        """See that there is such an endpoint.

        Raises:
            RuntimeApiError: ValidationError, there is none, or there cannot be one.
        """
        ENDPOINT_NAME.check(name)
        if name not in self._settings.endpoints:
            raise endpoint_not_found(name)

    async def route(self, name: str, parameters: Parameters) -> Route:
        """The container's route for a call of an endpoint, and the headers that it gets.

        Raises:
            RuntimeApiError: ValidationError, something named is not there; ModelError, a model cannot be loaded.
            TimeoutError: a target model takes too long to load.
        """
        variant = parameters.get("targetVariant")
        if variant not in (None, VARIANT):
            raise validation_error(f"Variant {variant} of endpoint {name} not found; it has {VARIANT} alone.")
        if (host := parameters.get("targetContainerHostname")) is not None:
            raise validation_error(f"TargetContainerHostname {host}: endpoint {name} has one container, not several.")
        headers = parameters.forwarded + self._adapter(parameters.get("inferenceComponentName"))
        model = parameters.get("targetModel")
        if model is None:
            return Route("/invocations", headers)
        if self.target_models is None:
            raise validation_error(f"TargetModel {model}: endpoint {name} is not a multi-model endpoint.")
        return Route(await self.target_models.path(name, model), headers)

    def loading(self, parameters: Parameters) -> bool:
        """Whether the target model of a call is being loaded."""
        model = parameters.get("targetModel")
        return model is not None and self.target_models is not None and self.target_models.loading(model)

    async def lost(self, parameters: Parameters) -> bool:
        """Whether a call's target model is not in the container any more; `route` has it loaded again."""
        model = parameters.get("targetModel")
        return model is not None and self.target_models is not None and await self.target_models.gone(model)

    async def close(self) -> None:
        """Wait for no target model any more."""
        if self.target_models is not None:
            await self.target_models.close()

    def _adapter(self, component: str | None) -> tuple[tuple[str, str], ...]:
        if component is None:
            if self._settings.components:
                raise validation_error(_COMPONENT_MISSING, "INFERENCE_COMPONENT_NAME_MISSING")
            return ()
        if component in self._settings.adapters:
            return ((_ADAPTER_HEADER, component),)
        if component in self._settings.components:
            return ()
        raise validation_error(f"Inference component {component} of account {ACCOUNT} not found.")
