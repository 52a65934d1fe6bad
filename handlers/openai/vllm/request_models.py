"""Changes vLLM's Pydantic models of requests and answers.

A router of JSON bodies has a module `protocol` beside it, with the models of its requests
(tests/live/test_openai_internals.py).
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
    """Call `stop_at_first_fault` once for the models of the requests of these routers.

    It takes a tenth of a second. The front end of a further model is built on the event loop, while others serve.
    """
    for name in routers:
        protocol = importlib.import_module(name.replace(".api_router", ".protocol"))
        for kind in vars(protocol).values():
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__pydantic_complete__:
                stop_at_first_fault(kind)


def stop_at_first_fault(kind: type[BaseModel]) -> None:
    """Make a model of requests refuse a list or an object at its first wrong item.

    Call it before FastAPI uses the model. Otherwise Pydantic describes the fault of every item, while the event loop
    waits: in 5 ms for each item of the `input` of a response, and in 0.06 ms for each number in the `content` of a
    message, of which a body of 256 KiB holds 130,000. `FailFast` reaches the list of a field, and no list in it.
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
    # The prebuilt validators of the models in its fields do not know of the change.
    kind.__pydantic_validator__ = SchemaValidator(kind.__pydantic_core_schema__, _use_prebuilt=False)


@cache
def leave_out_turns() -> None:
    """Leave the lists of counts of turns out of the `usage` of responses, once.

    OpenAI's contract has numbers only, and OpenAI's agents in JavaScript refuse anything else.
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
    """Return vLLM's object for the body of an answer. `path` is a path of its front end."""
    kind = ChatCompletionResponse if path == CHAT else CompletionResponse
    return kind.model_validate_json(body)
