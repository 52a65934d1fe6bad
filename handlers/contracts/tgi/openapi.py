"""TGI's routes in the API description."""

from __future__ import annotations

from collections.abc import Mapping

from handlers.contracts.family import Operation
from handlers.contracts.schemas import OBJECT, STRING, Schema, an_answer, an_array, an_object, struct
from handlers.contracts.tgi.errors import EVENTS, JSON
from handlers.contracts.tgi.model import Chat
from handlers.contracts.tgi.request import Body

_REQUEST = struct(Body, "TgiRequest")
_ANSWER = an_answer(
    "TgiAnswer",
    "details, where asked for: finish_reason, generated_tokens, seed, prefill, tokens, top_tokens, best_of_sequences.",
    *("generated_text", "details"),
)
_EVENT = an_answer(
    "TgiEvent",
    "One for each token, which has id, text, logprob and special. The last one has generated_text and details.",
    *("index", "token", "top_tokens", "generated_text", "details"),
)
_TOKENS = an_array(
    an_answer("TgiToken", "A token and the bytes of the text from which it is.", "id", "text", "start", "stop")
)
_ERROR = an_answer("TgiError", "What is wrong, and its kind.", "error", "error_type")

_NOT_READY: dict[str, tuple[str, Mapping[str, Schema]]] = {"503": ("The model is not ready", {JSON: _ERROR})}
_FAILURES = {
    "422": ("A parameter is wrong, or the prompt is too long", {JSON: _ERROR}),
    "424": ("Generation failed", {JSON: _ERROR}),
    "429": ("The queue is full", {JSON: _ERROR}),
    **_NOT_READY,
}


def _generates(summary: str, meaning: str, content: Mapping[str, Schema], request: Schema = _REQUEST) -> Operation:
    return Operation(summary=summary, request=request, answers={"200": (meaning, content), **_FAILURES})


ROOT = _generates(
    "Generate text (TGI); events with `stream`", "The answer in an array", {JSON: an_array(_ANSWER), EVENTS: _EVENT}
)
GENERATE = _generates("Generate text (TGI)", "The answer", {JSON: _ANSWER})
GENERATE_STREAM = _generates(
    "Stream text (TGI)", "An event for each token; errors are events as well", {EVENTS: _EVENT}
)
VERTEX = _generates(
    "Generate texts (TGI, as Vertex AI asks for them)",
    "A text for each instance",
    {JSON: an_object({"predictions": an_array(STRING)})},
    an_object(
        {"instances": {**an_array(_REQUEST), "description": "Requests, also chats with `messages`."}}, "instances"
    ),
)
HEALTH = Operation(
    summary="Health (TGI)", answers={"200": ("The model can serve", {}), "503": ("It cannot", {JSON: _ERROR})}
)
INFO = Operation(
    summary="Model and limits (TGI)", answers={"200": ("The model and its limits", {JSON: OBJECT}), **_NOT_READY}
)
TOKENIZE = Operation(
    summary="Tokens of a text (TGI)", request=_REQUEST, answers={"200": ("The tokens", {JSON: _TOKENS}), **_NOT_READY}
)
CHAT_TOKENIZE = Operation(
    summary="Prompt and tokens of a chat (TGI)",
    request=struct(Chat, "TgiChat"),
    answers={
        "200": (
            "The prompt and its tokens",
            {JSON: an_object({"tokenize_response": _TOKENS, "templated_text": STRING})},
        ),
        "422": ("The model's template does not take these messages", {JSON: _ERROR}),
        **_NOT_READY,
    },
)
