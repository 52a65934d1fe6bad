"""Explains a call in place of answering it: the way of the body, and the requests that the engine would get.

A call with an `Explanation` takes the way of every other call up to the engine. There the requests are prepared, and
none is sent: `Explained` is raised (`explaining`). `explain` makes the reply of it. It finds the fields that set a
parameter by asking again, with another value of each field of the body, and without the field.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from engines.errors import RequestError
from engines.interface import ExplainedRequest, Generation, Sink
from engines.request import GenerationRequest
from engines.statistics import EngineStatistics
from handlers.contract import (
    JSON,
    Call,
    ContractError,
    Exchange,
    Explanation,
    Reply,
    ReplyWriter,
    Running,
    adapter_header,
)
from handlers.parsing.json_fields import JsonError, decode_json
from handlers.parsing.json_limits import off_the_loop
from handlers.queue import EngineQueue

# Of a call, at most this much is shown.
_MOST_PROMPTS, _MOST_IDS, _MOST_CHARACTERS = 8, 10_000, 100_000
_MOST_FIELDS = 64  # Fields of a body whose effect is looked for.
_SHORT_BODY, _SHORT = 16 * 1024, 1000  # Bytes. In a longer body, texts and lists are cut to this length for that.
_WITH_PARAMETERS = frozenset({"parameters", "sampling_parameters"})  # Objects whose members are parameters.
_LIMIT = "max_tokens"

Answer = Callable[[Call, ReplyWriter], Awaitable[Running | None]]
Place = tuple[str, ...]  # Of a field in a body: the names from the outside.


class ExplainedPrompt(msgspec.Struct, frozen=True):
    """A prompt of a call, and the request that the engine would get for it."""

    text: str
    request: ExplainedRequest
    adapter: str | None = None
    priority: int = 0


class Explained(Exception):
    """A call has been explained, and is not answered."""

    def __init__(
        self,
        prompts: Sequence[ExplainedPrompt] = (),
        *,
        limits: Mapping[str, int] | None = None,
        model_defaults: Collection[str] | None = None,
    ) -> None:
        """Create the explanation.

        Args:
            prompts: Its prompts. There are none if a customer's handler takes the body.
            limits: The limits of the model and its queue, by their names.
            model_defaults: The parameters whose default is the model's own. None: all that the model sets.
        """
        super().__init__("the call was explained")
        self.prompts, self.limits = prompts, limits or {}
        self.model_defaults = model_defaults


class _ExplainingEngine:
    """An engine that prepares the requests of one call, and raises `Explained` at the last one."""

    def __init__(self, queue: EngineQueue, exchange: Exchange | None) -> None:
        self._queue, self._exchange = queue, exchange
        self._prompts: list[ExplainedPrompt] = []
        self.statistics = EngineStatistics()  # Nothing of the call is counted elsewhere.

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        engine, exchange = self._queue.engine, self._exchange
        assert exchange is not None, "vLLM's front end submits nothing here"
        explained = await engine.explain(request)
        text = request.prompt
        if not isinstance(text, str) or request.truncate_prompt_tokens is not None:
            text = engine.texts.decode(explained.token_ids)
        self._prompts.append(ExplainedPrompt(text, explained, request.adapter, request.priority))
        if len(self._prompts) < len(exchange.requests):
            return _Nothing()
        raise Explained(
            self._prompts,
            limits=limits_of(self._queue),
            model_defaults=exchange.model_defaults,
        )


class _Nothing:
    """Implements `Generation` for a request that was not sent."""

    begun = False

    def cancel(self) -> None: ...

    def abort(self, *, at_deadline: bool = False) -> None: ...


def explaining(queue: EngineQueue, exchange: Exchange | None = None) -> EngineQueue:
    """Return a queue for one call that is to be explained. It refuses what `queue` would refuse now.

    Args:
        queue: The queue of the model's engine. It does not change.
        exchange: The parsed call. None: vLLM's front end has the call.
    """
    engine: Any = _ExplainingEngine(queue, exchange)
    own = EngineQueue(engine, queue.limit, queue.overload_status)
    own.open_sequences = queue.open_sequences
    return own


def limits_of(queue: EngineQueue) -> Mapping[str, int]:
    """Return the limits that an explanation shows."""
    return {
        "context_tokens": queue.engine.max_model_len,
        "queue_places": queue.limit,
        "free_places": queue.limit - queue.open_sequences,
    }


async def explain(call: Call, answer: Answer, writer: ReplyWriter) -> Running | None:
    """Reply to a call with its explanation, or with the refusal that the call gets.

    Args:
        call: The call.
        answer: Answers calls. It is called for variants of the call too.
        writer: Takes the reply.

    Returns:
        The running call, if the route generates nothing and answers as always.

    Raises:
        ContractError: The call is refused with the reply in the error.
        RequestError: The call is refused.
    """
    try:
        return await answer(call, writer)
    except Explained as found:
        explained = found.with_traceback(None)  # A traceback would hold this frame, which holds the exception.
    origins = Origins()
    assert call.explanation is not None
    if not call.explanation.once and not any(prompt.request.media for prompt in explained.prompts):
        origins = await _origins(call, answer)
    document = _document(call, explained, origins)
    writer.reply(Reply(200, JSON, json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")))
    return None


class Origins(msgspec.Struct):
    """The fields of a body, by their effects."""

    known: bool = False  # The effects were looked for.
    fields: dict[str, list[str]] = {}  # The fields that set a parameter, by its name.
    of_prompt: list[str] = []  # The fields that change the prompt.
    without_effect: list[str] = []  # The fields that the engine never sees.
    unknown: list[str] = []  # The fields without which the body is refused.


async def _origins(call: Call, answer: Answer) -> Origins:
    document = await off_the_loop(call.body, _read, call.body)
    asked = await _asked(call, answer, document) if isinstance(document, dict) else None
    if asked is None:
        return Origins()
    fields = list(_fields(document))
    origins = Origins(known=len(fields) <= _MOST_FIELDS)
    for place, value in fields[:_MOST_FIELDS]:
        bodies = [_with(document, place, other) for other in (_other(value), None)]
        found = [changed for body in bodies if (changed := await _asked(call, answer, body)) is not None]
        changed = next((each for each in found if each != asked), None)
        name = ".".join(place)
        if changed is not None:
            for parameter in asked.parameters.keys() & changed.parameters.keys():
                if asked.parameters[parameter] != changed.parameters[parameter]:
                    origins.fields.setdefault(parameter, []).append(name)
            if asked.token_ids != changed.token_ids:
                origins.of_prompt.append(name)
        else:
            (origins.without_effect if found else origins.unknown).append(name)
    return origins


def _read(body: bytes) -> Any:
    """Return the document of a body. The texts of a long one are cut. None if the body is no JSON."""
    try:
        document = decode_json(body)
    except JsonError:
        return None
    return document if len(body) <= _SHORT_BODY else _cut(document)


class _Asked(msgspec.Struct):
    """The request that the engine would get for the first prompt of a call."""

    token_ids: Sequence[int]
    parameters: Mapping[str, Any]


async def _asked(call: Call, answer: Answer, document: Any) -> _Asked | None:
    """Return the engine's request for another body. None if the body is refused."""
    await asyncio.sleep(0)
    other = replace(call, body=msgspec.json.encode(document), explanation=Explanation())
    try:
        await answer(other, _Dropped())
    except Explained as explained:
        for prompt in explained.prompts:
            return _Asked(prompt.request.token_ids, {**prompt.request.parameters, "adapter": prompt.adapter})
    except (ContractError, RequestError):
        pass
    return None


def _fields(document: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yield the fields of a body, and the members of objects that have parameters."""
    for name, value in document.items():
        if name in _WITH_PARAMETERS and isinstance(value, dict):
            yield from (((name, member), given) for member, given in value.items())
        else:
            yield (name,), value


def _with(document: Mapping[str, Any], place: Place, other: Any) -> Mapping[str, Any]:
    """Return a body with another value of a field. None: without the field."""
    name, *inner = place
    if inner:
        return {**document, name: _with(document[name], tuple(inner), other)}
    rest = {key: value for key, value in document.items() if key != name}
    return rest if other is None else {**rest, name: other}


def _other(value: Any) -> Any:
    """Return another value of the same kind. None for kinds other than numbers and booleans."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value / 2 or 0.5 if isinstance(value, float) else None


def _cut(value: Any) -> Any:
    """Return a document with at most `_SHORT` characters of each text, and items of each list."""
    if isinstance(value, str):
        return value[:_SHORT]
    if isinstance(value, list):
        return [_cut(item) for item in value[:_SHORT]]
    return {name: _cut(member) for name, member in value.items()} if isinstance(value, dict) else value


def _document(call: Call, explained: Explained, origins: Origins) -> Mapping[str, Any]:
    assert call.explanation is not None
    document: dict[str, Any] = {
        "contract": call.explanation.contract,
        "because": call.explanation.because,
        "prompt_count": len(explained.prompts),
        "prompts": [],
        "ignored": call.explanation.ignored,
    }
    if not explained.prompts:
        return document
    first, context = explained.prompts[0], explained.limits["context_tokens"]
    characters, ids = _MOST_CHARACTERS, _MOST_IDS
    for prompt in explained.prompts[:_MOST_PROMPTS]:
        text, token_ids = prompt.text[:characters], prompt.request.token_ids[:ids]
        characters, ids = characters - len(text), ids - len(token_ids)
        document["prompts"].append(
            {
                "text": text,
                "characters": len(prompt.text),
                "token_ids": token_ids,
                "tokens": len(prompt.request.token_ids),
                "new_tokens": prompt.request.parameters.get(_LIMIT),
                "copy": prompt.request.copy,
                "cached_tokens": prompt.request.cached_tokens,
            }
        )
    header, body = adapter_header(call), origins.fields.pop("adapter", [])
    document["adapter"] = None
    if first.adapter is not None:
        document["adapter"] = _origin(first.adapter, "header" if header else "body", () if header else body)
    document |= {
        "parameters": _parameters(first.request, explained, origins, context - len(first.request.token_ids)),
        "not_held": list(first.request.not_held),
        "priority": _origin(first.priority, "header" if "priority" in call.steering else "default"),
        "cache_salt": _salt(call, first.request),
        "limits": explained.limits,
        "origins_known": origins.known,
        "translated": {
            field: parameter
            for parameter, fields in origins.fields.items()
            for field in fields
            if field.rpartition(".")[2] != parameter
        },
        "changes_prompt": origins.of_prompt,
        "without_effect": origins.without_effect,
        "effect_unknown": origins.unknown,
    }
    return document


def _parameters(request: ExplainedRequest, explained: Explained, origins: Origins, room: int) -> Mapping[str, Any]:
    """Return each parameter that has a value, with its origin."""
    shown = {}
    for name, value in request.parameters.items():
        fields = origins.fields.get(name, ())
        default, place = request.model_defaults.get(name, (None, ""))
        follows = explained.model_defaults is None or name in explained.model_defaults
        if name == _LIMIT and value == room:
            origin: str | None = "context"
        elif fields:
            origin = "body"
        elif place and follows and value == default:
            origin = place
        else:
            origin = "default" if origins.known else None
        if fields or value not in (None, [], {}):
            shown[name] = _origin(value, origin, fields)
    return shown


def _origin(value: Any, origin: str | None, fields: Collection[str] = ()) -> Mapping[str, Any]:
    found = {"value": value, "from": origin}
    return found | {"fields": list(fields)} if fields else found


def _salt(call: Call, request: ExplainedRequest) -> str | None:
    """Return the origin of the salt of the prefix cache. The salt itself may be a secret."""
    if not request.cache_salt:
        return None
    if call.steering.get("cache_salt") is None:
        return "body"
    return "key" if call.steering["cache_salt"] == call.key_salt else "header"


class _Dropped:
    """Implements `ReplyWriter`: drops a reply."""

    def reply(self, reply: Reply) -> None: ...

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None: ...

    def write(self, data: bytes) -> None: ...

    def write_latest(self, part: Callable[[], bytes]) -> None: ...

    def end(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...
