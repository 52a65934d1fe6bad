"""The interface through which contracts manage the server's models and their adapters. The server implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engines.adapters import AdapterRegistry
from handlers.contract import Call, Reply

MAX_BODY = 256 * 1024  # Bytes. The largest body of a management call. The event loop decodes it, so it is small.


@dataclass(frozen=True, slots=True)
class Registration:
    """The parameters of `POST /models`."""

    url: str
    name: str | None
    version: str | None
    settings: Mapping[str, str]  # The model's settings, with their keys in serving.properties.
    synchronous: bool


@dataclass(frozen=True, slots=True)
class ListedModel:
    """The fields that a list of models shows for each model."""

    name: str
    version: str | None
    url: str
    status: str


@dataclass(frozen=True, slots=True)
class DescribedWorker:
    """The fields of a worker: a process of a custom handler, or a copy of a model."""

    id: int
    started: float  # Seconds since the epoch.
    status: str


@dataclass(frozen=True, slots=True)
class DescribedGroup:
    """The workers of one device."""

    gpu: int | None  # None means the CPU.
    min_workers: int
    max_workers: int
    workers: Sequence[DescribedWorker]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel(ListedModel):
    """The fields that the description of one model shows."""

    batch_size: int
    max_batch_delay: float  # Seconds.
    max_idle_time: float  # Seconds.
    queue_size: int
    waiting: int
    at_startup: bool
    groups: Sequence[DescribedGroup]


class RegistrationFailed(Exception):
    """A model cannot be registered or loaded."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause, self.message = cause, message


# The meaning of each cause, in order: no model is at the URL; the name and version are taken; the settings are wrong;
# memory is short; the load failed.
Cause = Literal["url", "registered", "settings", "memory", "load"]


class Management(Protocol):
    """The server's models. Methods that take a model's name raise UnknownModel if no model has this name."""

    multi_model: bool  # True if the server is a SageMaker multi-model endpoint.

    def adapters(self, model: str | None) -> AdapterRegistry:
        """Return the adapters of a model, or of the startup model.

        Raises:
            NotServed: `option.enable_lora` is off, or the model has several versions.
            NotReady: The model is not loaded.
        """

    def listed(self, name: str | None = None, version: str | None = None) -> Sequence[ListedModel]:
        """Return all models, all versions of a model, or one version."""

    def described(self, name: str, version: str | None) -> Sequence[DescribedModel]:
        """Return all versions of a model, or one version."""

    async def register(self, order: Registration) -> str:
        """Register a model and load it. If `order` is not synchronous, do not wait until the model is loaded.

        Returns:
            The model's name.

        Raises:
            RegistrationFailed: The model cannot be registered or loaded.
        """

    def workers(self, name: str, version: str | None) -> tuple[int, int]:
        """Return the minimum and the maximum number of workers of a model."""

    def scale(self, name: str, version: str | None, least: int, most: int) -> tuple[int, int]:
        """Set the minimum and the maximum number of workers. Return the limits that now apply.

        Raises:
            InvalidRequest: The model cannot have the requested minimum or maximum number of workers.
        """

    async def unregister(self, name: str, version: str | None) -> None:
        """Unload all versions of a model, or one version."""


ManagementOperation = Callable[[Call, Management], Awaitable[Reply]]
