"""Changes vLLM's Pydantic models of requests and answers.

This module relies on vLLM's layout: next to each `api_router` module whose routes take JSON bodies, a module `protocol`
has the models of these bodies. tests/live/test_openai_internals.py checks it.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import SchemaValidator
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesResponse,
    ResponseUsage,
)

from handlers.openai.constraints import CHAT
from handlers.openai.vllm.responses import ResponseFailed, ResponseIncomplete


@cache
def stop_at_first_faults(routers: tuple[str, ...]) -> None:
    """Call `stop_at_first_fault` once for each Pydantic model of these routers' requests.

    This takes a tenth of a second. Repeated calls do nothing, because the front end of a further language model is
    built on the event loop while other models serve.
    """
    for name in routers:
        protocol = importlib.import_module(name.replace(".api_router", ".protocol"))
        for kind in vars(protocol).values():
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__pydantic_complete__:
                stop_at_first_fault(kind)


def stop_at_first_fault(kind: type[BaseModel]) -> None:
    """Make a Pydantic model refuse a list or an object at its first wrong item.

    Call this before FastAPI uses the model. By default, Pydantic reports the errors of every item. This blocks the
    event loop for 5 ms for each item of a response's `input`, and for 0.06 ms for each number in a message's `content`.
    A body of 256 KiB can contain 130,000 such numbers. Pydantic's `FailFast` applies only to the list of a field, and
    not to lists within that list.
    """
    waiting: list[Any] = [kind.__pydantic_core_schema__]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("type") in ("list", "dict"):
                node["fail_fast"] = True
            waiting += [value for key, value in node.items() if key not in ("metadata", "serialization")]
        elif isinstance(node, list | tuple):
            waiting += node
    # Pydantic would use the prebuilt validators of the models in the fields. Prebuilt validators do not stop at the
    # first wrong item.
    kind.__pydantic_validator__ = SchemaValidator(kind.__pydantic_core_schema__, _use_prebuilt=False)


@cache
def leave_out_turns() -> None:
    """Remove the lists of token counts per turn from the `usage` of responses. Repeated calls do nothing.

    In OpenAI's contract, these details are only numbers. OpenAI's Agents SDK for JavaScript refuses lists.
    """
    for details in (InputTokensDetails, OutputTokensDetails):
        for name, field in details.model_fields.items():
            if name.endswith("_per_turn"):
                field.exclude = True
    of_responses = (ResponsesResponse, ResponseCompletedEvent, ResponseCreatedEvent, ResponseInProgressEvent)
    for kind in (
        *(InputTokensDetails, OutputTokensDetails, ResponseUsage),
        *of_responses,
        *(ResponseFailed, ResponseIncomplete),
    ):
        kind.model_rebuild(force=True)


def answer_object(path: str, body: bytes) -> Any:
    """Return vLLM's object for the body of an answer. `path` is a path of vLLM's front end."""
    kind = ChatCompletionResponse if path == CHAT else CompletionResponse
    return kind.model_validate_json(body)
