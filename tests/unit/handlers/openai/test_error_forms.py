"""Errors in replies and at the end of streams, read with the types of OpenAI's and Anthropic's packages."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from engines.errors import (
    AdapterUnusable,
    BodyTimeout,
    BodyTooLarge,
    ContextExceeded,
    EngineDead,
    InternalError,
    InvalidParameter,
    NotReady,
    NotServed,
    Overloaded,
    RequestError,
    Unauthorized,
    UnknownAdapter,
    UnknownModel,
)
from handlers.openai import anthropic
from handlers.openai.error_forms import error_form
from handlers.openai.routes import ANTHROPIC, error_reply, refuse

# The tests import the packages, because each process of the unit tests imports this file.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("anthropic") is None, reason="anthropic is not installed")


def events(data: bytes) -> list[tuple[str, Any]]:
    """Return the name and the document of each event."""
    lines = [event.split("\n") for event in data.decode().split("\n\n")[:-1]]
    return [(name.removeprefix("event: "), json.loads(text.removeprefix("data: "))) for name, text in lines]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UnknownModel("x", "no such model"), 404, "not_found_error"),
        (UnknownAdapter("x"), 404, "not_found_error"),
        (NotServed("needs vLLM"), 501, "api_error"),
        (NotReady("loading"), 503, "overloaded_error"),
        (Overloaded("the queue is full"), 503, "overloaded_error"),
        (Unauthorized(), 401, "authentication_error"),
        (BodyTooLarge("too large"), 413, "request_too_large"),
        (BodyTimeout("late"), 408, "invalid_request_error"),
        (InvalidParameter("n", "must be 1"), 400, "invalid_request_error"),
        (ContextExceeded(9, 1, 8), 400, "invalid_request_error"),
        (AdapterUnusable("x", "gone"), 400, "invalid_request_error"),
        (InternalError(), 500, "api_error"),
        (EngineDead(), 500, "api_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_is_one_of_anthropics(error: RequestError, status: int, kind: str) -> None:
    from anthropic.types import ErrorResponse

    reply = ANTHROPIC.refuse(error)
    document = json.loads(reply.body)
    assert (reply.status, document) == (status, {"type": "error", "error": {"type": kind, "message": error.message}})
    if kind != "request_too_large":  # documented, but not in the package
        ErrorResponse.model_validate(document, strict=True)


def test_a_message_stream_ends_with_one_error_event() -> None:
    from anthropic.types import ErrorResponse

    form = error_form("/v1/messages")
    ((name, document),) = events(form.last_events(refuse(Overloaded("full"))))
    assert (name, document["error"]["type"]) == ("error", "overloaded_error")
    ErrorResponse.model_validate(document, strict=True)


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_prompt"), (503, "rate_limit_exceeded"), (500, "server_error")]
)
def test_a_response_stream_ends_with_openais_events(status: int, code: str) -> None:
    from openai.types.responses import ResponseError, ResponseErrorEvent

    form = error_form("/v1/responses")
    for number in range(3):
        document = {"response": {"id": "r", "status": "in_progress"}, "sequence_number": number}
        form.sent(f"event: x\ndata: {json.dumps(document)}\n\n".encode())
    (error, told), (failed, last) = events(form.last_events(error_reply("why", "x", status, "input")))
    assert (error, failed) == ("error", "response.failed")
    event = ResponseErrorEvent.model_validate(told, strict=True)
    assert (event.code, event.message, event.param, event.sequence_number) == (code, "why", "input", 3)
    assert (last["sequence_number"], last["response"]["id"], last["response"]["status"]) == (4, "r", "failed")
    assert ResponseError.model_validate(last["response"]["error"], strict=True).message == "why"


def test_a_stream_of_a_response_from_its_middle_has_no_response_to_repeat() -> None:
    form = error_form("/v1/responses/r")
    form.sent(b'event: x\ndata: {"delta":"a","sequence_number":5}\n\n')
    ((name, document),) = events(form.last_events(refuse(EngineDead())))
    assert (name, document["sequence_number"]) == ("error", 6)


def test_models_are_listed_as_by_anthropic() -> None:
    from anthropic.types import ModelInfo

    cards = [{"id": name, "created": 0, "max_model_len": 8} for name in ("a", "b")]
    document = anthropic.model_list(cards)
    assert [ModelInfo.model_validate(info).id for info in document.pop("data")] == ["a", "b"]
    assert document == {"has_more": False, "first_id": "a", "last_id": "b"}
    assert anthropic.model_list([]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}
