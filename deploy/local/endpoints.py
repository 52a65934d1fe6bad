"""The endpoints, and where in the container their inference components, adapters and target models are."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.container import ContainerClient, read_up_to
from deploy.local.errors import ACCOUNT, MAX_ORIGINAL_MESSAGE, model_error, validation_error
from deploy.local.parameters import VARIANT, Parameters, check_endpoint_name

logger = logging.getLogger(__name__)

MEBIBYTE = 1 << 20

_ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
_COMPONENT_MISSING = (
    "Inference Component Name header is required for endpoints to which you plan to deploy inference components. "
    "Please include Inference Component Name header or consider using SageMaker models."
)
_LOAD_SECONDS = 900.0
_UNKNOWN, _ALREADY_LOADED, _NO_MEMORY = 404, 409, 507


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """One container, the endpoints in front of it, and their limits, by default those of the platform."""

    container: str
    """Base URL."""
    endpoints: tuple[str, ...]
    components: frozenset[str] = frozenset()
    """Inference components that are the base model. If there are any, each call has to name one, as on the platform."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Inference components that are adapters, each with its source; "" if the container has it already."""
    models_dir: Path | None = None
    """Directory with the models that `TargetModel` names."""
    async_output: str | None = None
    """A folder or `s3://bucket/prefix` for asynchronous results; None: no asynchronous invocations."""
    max_payload: int = 25 * MEBIBYTE
    """Bytes of a request, and of an answer that is not streamed."""
    answer_timeout: float = 60.0
    """Seconds until an answer is complete, or until the first byte of a stream."""
    stream_timeout: float = 480.0
    """Seconds until a stream is complete."""
    max_connections: int = 512
    """Connections to the container; a call beyond them waits a few seconds and is refused then."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the container, and the headers that it gets."""

    path: str
    headers: tuple[tuple[str, str], ...]


class Endpoints:
    """The endpoints of one container."""

    def __init__(self, settings: LocalSettings, container: ContainerClient) -> None:
        self._settings = settings
        self.models = TargetModels(settings.models_dir, container)

    def check_name(self, name: str) -> None:
        """Check that an endpoint exists.

        Raises:
            RuntimeApiError: ValidationError, the name is malformed or unknown.
        """
        check_endpoint_name(name)
        if name not in self._settings.endpoints:
            raise validation_error(f"Endpoint {name} of account {ACCOUNT} not found.")

    async def route(self, name: str, parameters: Parameters) -> Route:
        """The container's route for a call of an endpoint; loads the call's target model first.

        Raises:
            RuntimeApiError: ValidationError, something that the call names does not exist; ModelError, the container
                cannot load the target model.
            TimeoutError: the target model takes too long to load.
        """
        variant = parameters.values.get("TargetVariant")
        if variant not in (None, VARIANT):
            raise validation_error(f"Variant {variant} of endpoint {name} not found; it has {VARIANT} alone.")
        if (host := parameters.values.get("TargetContainerHostname")) is not None:
            raise validation_error(f"TargetContainerHostname {host}: endpoint {name} has one container, not several.")
        headers = parameters.forwarded + self._adapter(parameters.values.get("InferenceComponentName"))
        model = parameters.values.get("TargetModel")
        return Route("/invocations" if model is None else await self.models.path(name, model), headers)

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


class TargetModels:
    """The models below one directory, and which of them the container has loaded."""

    def __init__(self, directory: Path | None, container: ContainerClient) -> None:
        """`directory`: None for endpoints without target models."""
        self._directory = directory.resolve() if directory is not None else None
        self._container = container
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """The least recently used first."""
        self._one_at_a_time = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        """Loads under way. They outlive the calls that wait for them, so that a slow model is loaded in the end."""

    async def path(self, endpoint: str, name: str) -> str:
        """The container's route for a target model, which is loaded first if necessary.

        Raises:
            RuntimeApiError: ValidationError, there is no such model; ModelError, the container cannot load it.
            TimeoutError: it takes the container too long.
        """
        directory = self._find(endpoint, name)
        identity = _identity(name)
        if identity in self._loaded:
            self._loaded.move_to_end(identity)
        else:
            await asyncio.shield(self._loads.get(identity) or self._begin(endpoint, identity, directory))
        return f"/models/{identity}/invoke"

    def loading(self, name: str | None) -> bool:
        """Whether a target model is being loaded; False for None, as below."""
        return name is not None and _identity(name) in self._loads

    async def lost(self, name: str | None) -> bool:
        """Whether the container has unloaded a target model; if so, the next `path` loads it again."""
        if name is None:
            return False
        identity = _identity(name)
        status, _ = await self._ask("GET", f"/models/{identity}", b"")
        if status != _UNKNOWN:
            return False
        self._loaded.pop(identity, None)
        return True

    def forget(self) -> None:
        """Take all models for unloaded: the container has been started again."""
        self._loaded.clear()

    async def close(self) -> None:
        """Cancel the loads."""
        for load in self._loads.values():
            load.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    def _find(self, endpoint: str, name: str) -> Path:
        """A directory of this name, or of this name without the ending of an archive."""
        if self._directory is None:
            raise validation_error(f"TargetModel {name}: endpoint {endpoint} is not a multi-model endpoint.")
        for candidate in (name, name.removesuffix(".tar.gz")):
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
                # The calls that waited for it may be gone, so it is logged in any case.
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
        if status != _ALREADY_LOADED and not 200 <= status < 300:
            raise model_error(endpoint, status, answer)
        self._loaded[identity] = None

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes | None]:
        headers = [("content-type", "application/json")]
        async with self._container.request(method, path, headers, body) as response:
            return response.status_code, await read_up_to(response, MAX_ORIGINAL_MESSAGE)


def _identity(name: str) -> str:
    """The container's name for a target model: a hash, as on the platform."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
