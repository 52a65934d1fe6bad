"""The internals of vLLM that Slipway calls or replaces, and the check that the installed vLLM has them.

Slipway was run with the release in `RELEASE` and no other. `check_vllm` looks for what is listed here whenever an
engine starts; what only running can show is held by tests/live/*_seam.py. To move to another release: change `RELEASE`
and pyproject.toml, run those tests, and read the modules named here against vLLM's source.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import vllm
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from handlers.engines.protocol import EngineStartError

logger = logging.getLogger(__name__)

RELEASE = "0.32"
_STATE = (
    *("request_id", "external_req_id", "parent_req", "request_index", "lora_request", "output_kind", "prompt"),
    *("prompt_token_ids", "prompt_embeds", "logprobs_processor", "detokenizer", "max_tokens_param", "arrival_time"),
    *("queue", "log_stats", "stream_interval"),
)
_PARAMETERS: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    # handlers.engines.vllm.output
    (RequestState, "__init__", _STATE),
    (RequestState, "make_request_output", ("new_token_ids", "pooling_output", "finish_reason", "stop_reason")),
    (OutputProcessor, "abort_requests", ("request_ids", "internal")),
    (LogprobsProcessor, "_correct_decoded_token", ("token_id", "context_token_ids")),
    # handlers.engines.vllm.lora
    (AsyncLLM, "add_lora", ("lora_request",)),
    (AsyncLLM, "remove_lora", ("lora_id",)),
    # handlers.openai.engine_client; `lora_request`: handlers.engines.vllm.lora
    (AsyncLLM, "add_request", ("request_id", "prompt", "params")),
    (AsyncLLM, "abort", ("request_id", "internal")),
    (LogprobsProcessor, "update_from_output", ("output",)),
    (RequestOutputCollector, "put", ("output",)),
    (RequestOutputCollector, "get_nowait", ()),
)


def check_vllm() -> None:
    """Refuse to start on a vLLM whose internals have moved, and warn of a release that Slipway was never run with.

    Raises:
        EngineStartError: naming what is missing.
    """
    if not vllm.__version__.startswith(f"{RELEASE}."):
        logger.warning("vLLM %s is installed; Slipway was run with %s.x only", vllm.__version__, RELEASE)
    for owner, name, parameters in _PARAMETERS:
        known = inspect.signature(required_function(owner, name)).parameters
        if missing := [parameter for parameter in parameters if parameter not in known]:
            raise unknown_vllm(f"{owner.__name__}.{name} has no parameter {', '.join(missing)}")
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "check")
    for thing, attributes in (
        (LogprobsLists, ("logprob_token_ids", "logprobs", "sampled_token_ranks")),
        (LogprobsTensors, ("logprobs", "selected_token_ranks")),
        (OutputProcessor(None, log_stats=False), ("request_states", "external_req_ids")),
        (collector, ("output", "request_id")),
    ):
        if missing := [name for name in attributes if not hasattr(thing, name)]:
            kind = thing if isinstance(thing, type) else type(thing)
            raise unknown_vllm(f"{kind.__name__} has no attribute {', '.join(missing)}")


def required_function(owner: Any, name: str) -> Callable[..., Any]:
    """Return a function of a module or class of vLLM's.

    Raises:
        EngineStartError: there is none of this name.
    """
    function: Callable[..., Any] | None = getattr(owner, name, None)
    if not callable(function):
        raise unknown_vllm(f"{owner.__name__} has no {name}")
    return function


def unknown_vllm(what: str) -> EngineStartError:
    """Return the error for a vLLM that differs from the one that Slipway was run with; `what` says where."""
    return EngineStartError(f"this vLLM is not one that Slipway knows: {what}")
