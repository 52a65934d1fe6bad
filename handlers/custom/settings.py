"""The settings of a customer's handler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.settings.declaration import Setting, declared, setting
from engines.settings.engine_config import ENVIRONMENT
from engines.settings.parsers import BOOLEAN, SECONDS_OR_NEVER, TEXT, integer, matching

_WORKERS = integer(0, 1024)
ENTRY_POINT = Setting(
    "option.entryPoint",
    TEXT,
    variables=("DJL_ENTRY_POINT",),
    shows_default=False,
    doc="`.py` file in the model directory, a module, or a name from LMI; default: `model.py`",
)
ASYNC_MODE = Setting(
    "option.async_mode",
    BOOLEAN,
    "false",
    doc="The function is `async`, and its calls run concurrently. Without a handler: [LMI's asynchronous "
    "schema](lmi_async.md)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageConfig:
    """How the packages of `requirements.txt` are installed. Environment variables set these fields."""

    offline: bool = False  # Whether packages are installed without an index (DJL_OFFLINE).
    install_requirements: bool = True  # False installs nothing (STANDARD_AUTO_INSTALL_REQ).
    pip_arguments: tuple[str, ...] = ()  # These replace `-r requirements.txt` (STANDARD_PIP_ARGS).


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerConfig:
    """A customer's handler, which runs in worker processes."""

    # The absolute path of a `.py` file, or the name of a module.
    entry_point: str = field(metadata=ENTRY_POINT.metadata)
    function: str = setting(
        "option.handler", matching(r"[^\W\d]\w*", "the name of a function"), "handle", doc="The handler's function"
    )
    # Whether the function is a coroutine function whose calls run concurrently.
    async_mode: bool = field(default=False, metadata=ASYNC_MODE.metadata)
    min_workers: int = setting(
        "minWorkers",
        _WORKERS,
        "1",
        aliases=("min_workers",),
        doc="Workers for each device that always run; engine: copies that must serve before the model is ready "
        "(default: all)",
    )
    max_workers: int = setting(
        "maxWorkers",
        _WORKERS,
        "1",
        aliases=("max_workers",),
        doc="Maximum number of workers for each device; engine: number of [copies](#how-many-copies-run)",
    )
    # Seconds after which an idle worker beyond `min_workers` ends.
    max_idle_time: float = setting(
        "max_idle_time",
        SECONDS_OR_NEVER,
        "60",
        doc="Time after which an idle worker ends, if more than `minWorkers` run",
    )
    # The number of crashes, hangs and failed restarts of workers that a healthy model may have.
    retry_threshold: int = setting(
        "retry_threshold",
        integer(0),
        "0",
        doc="Maximum number of crashes, hangs and failed restarts of workers. After one more, `/ping` is 500",
    )
    # None means the interpreter that runs this process.
    python_executable: str | None = setting(
        "option.pythonExecutable",
        TEXT,
        aliases=("option.python_executable",),
        variables=("PYTHON_EXECUTABLE",),
        doc="Interpreter of the workers",
    )
    # Environment variables in addition to the variables of this process.
    environment: Mapping[str, str] = field(default_factory=dict, metadata=ENVIRONMENT.metadata)
    # Whether the model gets its own virtual environment even if no packages have to be installed.
    enable_venv: bool = setting(
        "option.enable_venv", BOOLEAN, "false", doc="Make a virtual environment even without `requirements.txt`"
    )
    # The properties of the handler's first call: the model's settings, as text and without the prefix `option.`.
    properties: Mapping[str, str] = field(default_factory=dict)
    # Each entry names the GPUs of one worker, such as "0", or "0,1" for two GPUs. Workers are spread over the entries.
    # Without entries, workers use the CPU.
    devices: tuple[str, ...] = ()
    # Whether a worker with one GPU sees only its own GPU. A worker with several GPUs always sees only its own GPUs.
    sees_own_gpus: bool = False
    rolling_batch: bool = False  # If True, the function is called for each step, with all active requests.
    packages: PackageConfig = field(default_factory=PackageConfig)


HANDLER_SETTINGS = declared(HandlerConfig)
FUNCTION, MIN_WORKERS, MAX_WORKERS = (HANDLER_SETTINGS[name] for name in ("function", "min_workers", "max_workers"))
