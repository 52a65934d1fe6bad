"""The settings as the server uses them, with the record of where each came from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from container.api_keys import ApiKeys
from container.settings.values import Value
from engines.adapters import AdapterDownloads
from engines.model_settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the process listens, queues, logs and ends.

    Sizes are in bytes, times in seconds.

    `container.settings.server` has their names and allowed values. docs/configuration.md explains each.
    """

    host: str = "0.0.0.0"
    port: int = 8080
    job_queue_size: int = 1000
    max_request_size: int = 67108864
    max_request_memory: int | None = None
    request_read_timeout: float = 60.0
    drain_timeout: float = 20.0
    fail_fast: bool = False
    stall_timeout: float | None = None  # None: 60 s, and 300 s for an engine that has worked for less than ten minutes.
    fail_fast_when_stalled: bool = False
    engine_restart: int = 3  # Within ten minutes.
    continue_calls: int = 1  # Deaths of the engine after which a call is continued; 0: it gets an error.
    engine_restart_when_stalled: bool = False
    log_format: Literal["plain", "json"] = "plain"
    log_level: str = "info"
    verbose: bool = False  # The log has the lines of vLLM and other libraries.
    log_prompts: bool = False
    capture: str | None = None  # The directory for the records of inference requests.
    request_id_header: str = "x-request-id"
    allow_multi_status: bool = False
    health_check_override: bool = False
    workers_health_check: bool = False
    management_address: str | None = None
    multi_model: bool = False
    console: bool = True
    error_rate_wlm: str | None = None  # This and the next three are for `container.observability.error_rates`.
    error_rate_server: str | None = None
    error_rate_model: str | None = None
    error_rate_any: str | None = None
    api_keys: ApiKeys | None = None  # Callers need one of these; None: they need none.
    # Further names under which browsers may reach the server's own routes (`container.http.cross_site`).
    allowed_hosts: tuple[str, ...] = ()
    cors_allowed_origin: str | None = None
    cors_allowed_methods: str | None = None
    cors_allowed_headers: str | None = None
    model_aliases: tuple[str, ...] = ("dummy", "tgi", "tei", "text-embeddings-inference")
    throttle_error_http_code: int = 503
    wlm_error_http_code: int = 503
    server_error_http_code: int = 500


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One line of the report on settings."""

    name: str
    value: str | int | float | bool | None
    source: str  # "default", or the written text and its place, such as "environment: OPTION_DTYPE".
    note: str = ""


@dataclass(frozen=True, slots=True)
class Alias:
    """A variable that sets another variable, its target."""

    variable: str
    target: str
    of: str  # The container whose variable it is.
    convert: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that count, as they were when the process started."""

    variables: Mapping[str, Value] = field(default_factory=dict)  # Including the targets of aliases.
    aliases: tuple[Alias, ...] = ()  # Those that are in effect.
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    downloads: Path = Path("/tmp/slipway")  # The directory for models that are fetched from S3.
    gpus: int = 0  # The GPUs that the settings are read for: this process's GPUs, or the GPUs of a machine to plan for.
    one_model: bool = False  # The server starts with this model alone.


class RemoteWeights(Protocol):
    """A model on S3 whose weights are fetched before it is loaded: how many bytes they are, and are here already.

    `fetch_weights` blocks; setting `stop` ends it. It raises SourceError.
    """

    @property
    def bytes_here(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    def fetch_weights(self, seconds: float, stop: threading.Event) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """The settings of a server, with the record of where each came from."""

    server: ServerSettings
    entries: tuple[SettingEntry, ...] = ()
    warnings: tuple[str, ...] = ()
    aliases: tuple[Alias, ...] = ()  # Those that are in effect.
    # Environment variables for libraries that read them.
    exports: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ServerReport):
    """All settings of a model and of its server."""

    model: ModelSettings
    required_memory: int | None = None  # MiB that the model needs; None: to be estimated.
    reserved_memory: int = 500  # MiB that have to stay free.
    # Returns the parts of the model that the secure mode refuses, also after weights were downloaded; None: the mode is
    # off.
    model_faults: Callable[[], list[str]] | None = field(default=None, compare=False)
    # Returns the parts of an adapter's directory that it refuses.
    adapter_faults: Callable[[Path], list[str]] | None = field(default=None, compare=False)
    remote_models: tuple[RemoteWeights, ...] = ()  # Models whose weights are to be fetched before the model is loaded.
    # Fetches adapters while the model serves; None: adapters on S3 are refused.
    remote_adapters: AdapterDownloads | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StartupModel:
    """One of the models that a server starts with."""

    settings: Settings
    url: str
    version: str | None = None
    temporary: Path | None = None  # A directory that the server removes when it ends.

    @property
    def title(self) -> str:
        name = self.settings.model.name
        return f"{name}:{self.version}" if self.version else name


@dataclass(frozen=True, slots=True)
class Startup:
    """All that a server starts with."""

    server: ServerSettings
    models: tuple[StartupModel, ...]
    report: ServerReport | None = (
        None  # The origins of the server's settings; None: as in the settings of its one model.
    )
    # The environment and the command line. They count for models that are registered later as well.
    environment: Environment = Environment()
    command_line: Mapping[str, str] = field(default_factory=dict)

    @property
    def exports(self) -> dict[str, str]:
        return {name: text for one in self._all for name, text in one.exports.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(warning for one in self._all for warning in one.warnings))

    @property
    def _all(self) -> list[ServerReport]:
        return [*([] if self.report is None else [self.report]), *(model.settings for model in self.models)]


class SettingsError(Exception):
    """The settings cannot be used; `problems` names each one: the option, its source, its value, the allowed values.

    `warnings` has what else was found: an ignored value may be the reason for a missing one.
    """

    def __init__(self, problems: Iterable[str], warnings: Iterable[str] = ()) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        self.warnings = tuple(dict.fromkeys(warnings))
        super().__init__("\n".join(self.problems))


class UrlNotFound(Exception):
    """There is no model at a URL; the message names the URL and says what may be given."""
