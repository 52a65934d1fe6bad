"""TGI: the routes of Hugging Face's Text Generation Inference. Source: TGI's router 3.3, `src/server.rs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from handlers.contracts.family import ContractSetting, Family, Generates, Operation, Tells
from handlers.contracts.protocol import Answer, Call, ContractError, Exchange, Reply
from handlers.contracts.schemas import OBJECT, STRING, Schema, an_answer, an_array, an_object, struct
from handlers.contracts.tgi.answer import AnswerOptions, GenerationAnswer, StreamAnswer
from handlers.contracts.tgi.errors import EVENTS, JSON, refuse, refuse_stream, wrong_method
from handlers.contracts.tgi.model import Chat, tell_chat_tokens, tell_health, tell_info, tell_tokens
from handlers.contracts.tgi.request import (
    Body,
    TgiParameters,
    parameter_rules,
    read,
    shown_seed,
    unknown_fields,
    validate,
)
from handlers.contracts.tgi.vertex import LONG_CHATS, VertexContract
from handlers.errors import InvalidRequest, RequestError
from handlers.request import GenerationRequest

_COMMENT = b":\n\n"
"""What TGI sends while a stream is idle."""


@dataclass(frozen=True, slots=True)
class Style:
    """The differences between the generating routes."""

    streams: bool | None
    """None: the body's `stream` decides."""
    in_array: bool = False
    full_text: bool = False
    """Default of `return_full_text`."""


class TgiContract:
    """/, /generate or /generate_stream of one model."""

    def __init__(self, setting: ContractSetting, style: Style) -> None:
        self._settings, self._style = setting.settings, style
        self._rules = parameter_rules(setting.model, setting.settings)
        self._special_texts = {token_id: text for text, token_id in self._rules.special_ids.items()}
        self._compute_type = setting.settings.rolling_batch

    def parse(self, call: Call) -> Exchange:
        body, document = read(call, Body)
        streams = bool(body.stream) if self._style.streams is None else self._style.streams
        try:
            notes = self._notes(document)
            parameters = validate(body.inputs, body.parameters, self._rules, streams=streams)
        except InvalidRequest as error:
            reply = refuse(error)
            if streams:
                reply = refuse_stream(error, StreamAnswer(self._options(body)).headers)
            raise ContractError(reply, error.message) from None
        return self._exchange(call, body, parameters, streams, notes)

    def refusal(self, error: RequestError) -> Reply:
        return refuse(error)

    def _exchange(
        self, call: Call, body: Body, parameters: TgiParameters, streams: bool, notes: tuple[str, ...]
    ) -> Exchange:
        samplings = [parameters.sampling] * parameters.best_of
        if parameters.details:
            samplings = [parameters.seeded() for _ in samplings]
        want_tokens = streams or parameters.details or parameters.best_of > 1
        requests = tuple(
            GenerationRequest(
                request_id=call.request_id if parameters.best_of == 1 else f"{call.request_id}-{place}",
                prompt=body.inputs,
                sampling=sampling,
                stream=streams,
                truncate_prompt_tokens=parameters.truncate,
                room=parameters.room,
                want_tokens=want_tokens,
                want_logprobs=want_tokens,
                want_prompt_tokens=parameters.prefill,
                top_tokens=parameters.top_tokens if streams or parameters.details else 0,
                adapter=parameters.adapter,
            )
            for place, sampling in enumerate(samplings)
        )
        options = self._options(body, parameters, tuple(map(shown_seed, samplings)))
        answer: Answer = StreamAnswer(options) if streams else GenerationAnswer(options)
        return Exchange(requests, answer, notes, comment=_COMMENT if streams else b"")

    def _options(
        self, body: Body, parameters: TgiParameters | None = None, seeds: tuple[int | None, ...] = (None,)
    ) -> AnswerOptions:
        asked = body.parameters.return_full_text if body.parameters is not None else None
        return AnswerOptions(
            prompt=body.inputs if (self._style.full_text if asked is None else asked) else "",
            details=parameters is not None and parameters.details,
            top_tokens=parameters is not None and parameters.top_tokens > 0,
            in_array=self._style.in_array,
            seeds=seeds,
            special_texts=self._special_texts,
            characters=len(body.inputs),
            compute_type=self._compute_type,
        )

    def _notes(self, document: dict[str, Any]) -> tuple[str, ...]:
        unknown = unknown_fields(document)
        if not unknown:
            return ()
        if self._settings.strict_parameters:
            raise InvalidRequest(f"`{unknown[0]}` is not known to this server (option.strict_parameters is on)")
        return (f"fields without effect: {', '.join(unknown)}",)


_BODY = struct(Body, "TgiRequest")
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


def _generating(summary: str, meaning: str, content: Mapping[str, Schema], request: Schema = _BODY) -> Operation:
    """A route that generates, for the API description."""
    return Operation(summary=summary, request=request, answers={"200": (meaning, content), **_FAILURES})


_HEALTH = Operation(
    summary="Health (TGI)", answers={"200": ("The model can serve", {}), "503": ("It cannot", {JSON: _ERROR})}
)

TGI = Family(
    name="tgi",
    routes=(
        Generates(
            path="/",
            contract=partial(TgiContract, style=Style(streams=None, in_array=True, full_text=True)),
            about=_generating(
                "Generate text (TGI); events with `stream`",
                "The answer in an array",
                {JSON: an_array(_ANSWER), EVENTS: _EVENT},
            ),
        ),
        Generates(
            path="/generate",
            contract=partial(TgiContract, style=Style(streams=False)),
            about=_generating("Generate text (TGI)", "The answer", {JSON: _ANSWER}),
        ),
        Generates(
            path="/generate_stream",
            contract=partial(TgiContract, style=Style(streams=True)),
            about=_generating(
                "Stream text (TGI)", "An event for each token; errors are events as well", {EVENTS: _EVENT}
            ),
        ),
        Generates(
            path="/vertex",
            contract=VertexContract,
            long_body=LONG_CHATS,
            about=_generating(
                "Generate texts (TGI, as Vertex AI asks for them)",
                "A text for each instance",
                {JSON: an_object({"predictions": an_array(STRING)})},
                an_object(
                    {"instances": {**an_array(_BODY), "description": "Requests, also chats with `messages`."}},
                    "instances",
                ),
            ),
        ),
        Tells.of_all("/", tell_health, methods=("GET", "HEAD"), about=_HEALTH),
        Tells.of_all("/health", tell_health, methods=("GET", "HEAD"), about=_HEALTH),
        Tells(
            path="/info",
            tell=tell_info,
            about=Operation(
                summary="Model and limits (TGI)",
                answers={"200": ("The model and its limits", {JSON: OBJECT}), **_NOT_READY},
            ),
        ),
        Tells(
            path="/tokenize",
            tell=tell_tokens,
            methods=("POST",),
            where="inputs",
            about=Operation(
                summary="Tokens of a text (TGI)",
                request=_BODY,
                answers={"200": ("The tokens", {JSON: _TOKENS}), **_NOT_READY},
            ),
        ),
        Tells(
            path="/chat_tokenize",
            tell=tell_chat_tokens,
            methods=("POST",),
            about=Operation(
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
            ),
        ),
    ),
    refuse=refuse,
    wrong_method=wrong_method,
)
