"""Patches of vLLM's functions that compile constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager, backend_guidance

validate_guidance_grammar: Callable[..., None] = backend_guidance.validate_guidance_grammar


class TriedOutputs(StructuredOutputsParams):
    """A constraint that a trial has compiled."""


def tried(outputs: StructuredOutputsParams, **changes: Any) -> TriedOutputs:
    """Return a copy with these changes. vLLM does not compile the copy for a check (`patch_checks`)."""
    fields = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs) if field.init}
    return TriedOutputs(**fields | changes)


def patch_checks() -> None:
    """Patch the server's process, so that vLLM does not check a constraint that a trial has compiled.

    For the check, vLLM would compile the constraint again for each request, on the event loop.
    """

    def validate(params: SamplingParams, tokenizer: Any = None) -> None:
        if not isinstance(params.structured_outputs, TriedOutputs):
            validate_guidance_grammar(params, tokenizer)

    backend_guidance.validate_guidance_grammar = validate


def patch_grammars(advance: Callable[[Any, Any], None]) -> None:
    """Patch the engine process, so that it calls `advance` with each compiled grammar and its request.

    If a request continues after the death of its engine, its grammar must first accept the tokens that were sent.
    """
    create = StructuredOutputManager._create_grammar

    def created(self: StructuredOutputManager, request: Any) -> Any:
        grammar = create(self, request)
        advance(grammar, request)
        return grammar

    StructuredOutputManager._create_grammar = created
