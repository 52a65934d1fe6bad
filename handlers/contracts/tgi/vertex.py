"""TGI's /vertex: several requests in one call, as Vertex AI sends them.

Source: TGI's router, `src/vertex.rs`, which reads only `max_new_tokens` and `seed` of an instance's parameters. Here
all of them have an effect; sampling is the default, as it is there.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from handlers.contracts.family import ContractSetting
from handlers.contracts.protocol import Call, ContractError, Exchange, Reply
from handlers.contracts.tgi.answer import PredictionsAnswer
from handlers.contracts.tgi.errors import JSON, does_not_fit, error_document, refuse
from handlers.contracts.tgi.model import Chat, templated
from handlers.contracts.tgi.request import Parameters, Signed32, Unsigned32, Unsigned64, read, validate
from handlers.errors import InvalidRequest, RequestError
from handlers.request import GenerationRequest

LONG_CHATS = 16 * 1024
"""Bytes above which a body is parsed in a thread: the model's template takes up to 4 ms for them."""
_KIND = "Input validation error"

T = TypeVar("T")


class _TextInstance(msgspec.Struct, frozen=True):
    inputs: str
    parameters: Parameters | None = None


class _ChatInstance(Chat, frozen=True):
    max_tokens: Unsigned32 | None = None
    max_completion_tokens: Unsigned32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Signed32 | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Unsigned64 | None = None
    stop: tuple[str, ...] | None = None
    response_format: dict[str, Any] | None = None


class _Body(msgspec.Struct, frozen=True):
    instances: list[dict[str, Any]]


class VertexContract:
    """/vertex of one model."""

    def __init__(self, setting: ContractSetting) -> None:
        self._setting = setting

    def parse(self, call: Call) -> Exchange:
        body, _ = read(call, _Body)
        if not body.instances:
            raise ContractError(Reply(422, JSON, error_document(_KIND, _KIND).encode()), "no instances")
        requests = tuple(
            self._request(f"{call.request_id}-{place}", instance) for place, instance in enumerate(body.instances)
        )
        return Exchange(requests, PredictionsAnswer(len(requests)))

    def refusal(self, error: RequestError) -> Reply:
        return refuse(error)

    def _request(self, request_id: str, document: dict[str, Any]) -> GenerationRequest:
        if is_text := "inputs" in document:
            text = _instance(document, _TextInstance)
            prompt, given = text.inputs, text.parameters or Parameters()
        else:
            chat = _instance(document, _ChatInstance)
            prompt, given = templated(chat, self._setting.model.texts), _of_chat(chat)
        if given.do_sample is None:
            given = msgspec.structs.replace(given, do_sample=True)
        parameters = validate(prompt, given, self._setting, streams=False)
        if parameters.best_of > 1:
            raise InvalidRequest("`best_of` != 1 is not allowed for this endpoint")
        # A template has written the special tokens that the model wants.
        return parameters.request(request_id, prompt, add_special_tokens=is_text)


def _instance(document: dict[str, Any], shape: type[T]) -> T:
    try:
        return msgspec.convert(document, shape)
    except msgspec.ValidationError as error:
        raise does_not_fit(f"instances: {error}") from None


def _of_chat(chat: _ChatInstance) -> Parameters:
    """A chat's parameters by the names of /generate. As in TGI, a chat samples unless its temperature is 0."""
    if chat.tools:
        raise InvalidRequest("`tools` cannot be used here; /v1/chat/completions takes them")
    greedy = chat.temperature == 0.0
    return Parameters(
        temperature=None if greedy else chat.temperature,
        do_sample=not greedy,
        top_p=None if greedy else chat.top_p,
        top_k=None if greedy else chat.top_k,
        frequency_penalty=chat.frequency_penalty,
        repetition_penalty=chat.repetition_penalty,
        max_new_tokens=chat.max_tokens if chat.max_tokens is not None else chat.max_completion_tokens,
        seed=chat.seed,
        stop=chat.stop,
        grammar=chat.response_format,
    )
