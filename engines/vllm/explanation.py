"""Describes a request as vLLM's engine would get it, in JSON values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.config import ModelConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from engines.interface import ExplainedRequest
from engines.request import BeamSearch, GenerationRequest
from engines.vllm.beam_search import most_new_tokens
from engines.vllm.copies.client import CopiesClient

# Parameters that are not shown. They say how Slipway receives the tokens, or are calculated from other parameters.
_OWN = frozenset({"output_kind", "skip_clone", "stream_interval", "output_text_buffer_length"})
_GENERATION_CONFIG, _OVERRIDE = "generation_config.json", "option.override_generation_config"
_MOST_CHARACTERS = 100_000  # The maximum number of characters that are shown of a schema or a grammar.


def explained_request(
    request: EngineCoreRequest,
    client: CopiesClient,
    defaults: Mapping[str, tuple[Any, str]],
    sequences: int,
    not_held: tuple[str, ...],
) -> ExplainedRequest:
    """Return the explanation of a request.

    Args:
        request: vLLM's request, with its prompt and its parameters.
        client: The client of the copies. It chooses the copy, but does not record the choice.
        defaults: The result of `model_defaults`.
        sequences: The number of sequences that are generated.
        not_held: The parts of the JSON schema that the engine does not enforce.
    """
    params = request.sampling_params or request.pooling_params
    assert params is not None, "vLLM has checked the request"
    number, cached_tokens = client.expected(request)
    return ExplainedRequest(
        token_ids=list(request.prompt_token_ids or ()),
        parameters=shown_parameters(params) | ({"n": sequences} if request.sampling_params is not None else {}),
        not_held=not_held,
        media=bool(request.mm_features),
        cache_salt=request.cache_salt,
        copy=number,
        cached_tokens=cached_tokens,
        model_defaults=defaults if request.sampling_params is not None else {},
    )


def explained_search(
    request: GenerationRequest, search: BeamSearch, token_ids: list[int], room: int
) -> ExplainedRequest:
    """Return the explanation of a beam search. It names no copy, because any copy may get the requests of a step.

    Args:
        request: The request.
        search: The options of the beam search.
        token_ids: The prompt of the request.
        room: The number of tokens that fit into the context after the prompt.
    """
    sampling = request.sampling
    return ExplainedRequest(
        token_ids=token_ids,
        parameters={
            "beam_width": search.width,
            "length_penalty": search.length_penalty,
            "early_stopping": search.early_stopping,
            "max_tokens": most_new_tokens(request, room),
            "min_tokens": sampling.min_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        },
        cache_salt=request.cache_salt or None,
    )


def shown_parameters(params: msgspec.Struct) -> dict[str, Any]:
    """Return parameters by vLLM's names, as JSON values, without private parameters and without `_OWN`."""
    fields = (field.name for field in msgspec.structs.fields(type(params)))
    return {name: _shown(getattr(params, name)) for name in fields if not name.startswith("_") and name not in _OWN}


def model_defaults(model_config: ModelConfig, sampling: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    """Return the model's own sampling parameters. Each has a value, and the file or option that sets the value.

    Args:
        model_config: vLLM's configuration of the model.
        sampling: The parameters, as vLLM has read them.
    """
    overridden = {
        "max_tokens" if name == "max_new_tokens" else name for name in model_config.override_generation_config
    }
    return {name: (value, _OVERRIDE if name in overridden else _GENERATION_CONFIG) for name, value in sampling.items()}


def _shown(value: Any) -> Any:
    if isinstance(value, StructuredOutputsParams):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            name: _cut(part) for name, part in parts.items() if not name.startswith("_") and part not in (None, False)
        }
    # JSON has no infinity and no NaN, so such values become null.
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=repr))


def _cut(part: Any) -> Any:
    if isinstance(part, str) and len(part) > _MOST_CHARACTERS:
        return f"{part[:_MOST_CHARACTERS]}... ({len(part)} characters)"
    return part
