"""The settings as the server uses them, with the source of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from container.settings.environment import Alias, Environment
from container.settings.lookup import SettingEntry
from container.settings.server import ServerConfig
from engines.adapters import AdapterDownloads
from handlers.model_config import ModelConfig


class RemoteWeights(Protocol):
    """A model on S3, with the total size of its weights and the number of bytes that are already on this machine.

    The weights are fetched before the model is loaded. `fetch_weights` blocks until all weights are on this machine. It
    raises SourceError if the download fails, takes longer than `seconds`, or is stopped by `stop`.
    """

    @property
    def bytes_here(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    def fetch_weights(self, seconds: float, stop: threading.Event) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """The settings of a server, with the source of each."""

    server_config: ServerConfig
    entries: tuple[SettingEntry, ...] = ()
    warnings: tuple[str, ...] = ()
    aliases: tuple[Alias, ...] = ()  # The aliases that are in effect.


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ServerReport):
    """All settings of a model and of its server."""

    config: ModelConfig
    required_memory: int | None = None  # The memory that the model needs, in MiB. If None, it is estimated.
    reserved_memory: int = 500  # The memory that has to stay free, in MiB.
    # Returns those parts of the model that the secure mode refuses. It is called again after weights were downloaded.
    # None if the mode is off.
    model_faults: Callable[[], list[str]] | None = field(default=None, compare=False)
    # Returns those parts of an adapter's directory that the secure mode refuses.
    adapter_faults: Callable[[Path], list[str]] | None = field(default=None, compare=False)
    remote_models: tuple[RemoteWeights, ...] = ()  # Models whose weights must be fetched before the model is loaded.
    # Fetches adapters while the model serves. If None, adapters on S3 are refused.
    remote_adapters: AdapterDownloads | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StartupModel:
    """One of the models that a server starts with."""

    settings: Settings
    url: str
    version: str | None = None
    temporary: Path | None = None  # A directory that the server removes when it exits.

    @property
    def title(self) -> str:
        name = self.settings.config.name
        return f"{name}:{self.version}" if self.version else name


@dataclass(frozen=True, slots=True)
class Startup:
    """Everything that a server starts with."""

    server_config: ServerConfig
    models: tuple[StartupModel, ...]
    # The server's settings with their sources. None if the settings of the server's only model contain them.
    report: ServerReport | None = None
    # The environment and the command line. They also apply to models that are registered later.
    environment: Environment = field(default_factory=Environment)
    command_line: Mapping[str, str] = field(default_factory=dict)

    @property
    def exports(self) -> dict[str, str]:
        return self.environment.exports

    @property
    def warnings(self) -> tuple[str, ...]:
        reports = [*([] if self.report is None else [self.report]), *(model.settings for model in self.models)]
        return tuple(dict.fromkeys(warning for report in reports for warning in report.warnings))


class SettingsError(Exception):
    """The settings cannot be used. Each of `problems` names an option, its source, its value and the allowed values.

    `warnings` contains other findings. They may explain a problem: a value may be missing because it was ignored.
    """

    def __init__(self, problems: Iterable[str], warnings: Iterable[str] = ()) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        self.warnings = tuple(dict.fromkeys(warnings))
        super().__init__("\n".join(self.problems))


class UrlNotFound(Exception):
    """There is no model at a URL. The message names the URL and the allowed forms."""
