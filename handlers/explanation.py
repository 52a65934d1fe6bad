"""Explains a call instead of answering it: which contract reads the body, and which requests the engine would get.

A call with an `ExplainAsked` is handled like every other call until it reaches the engine. There the requests are
prepared but not sent, and `prepare` raises `Explained`. `explain` turns that exception into the reply. It also searches
for the fields that set each parameter (the search for origins): it repeats the call with other values of each field,
and without the field.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from engines.errors import EngineDead, GenerationFailed, InvalidParameter, Overloaded, RequestError
from engines.interface import ExplainedRequest, give_turn
from engines.request import GenerationRequest
from engines.statistics import EngineStatistics
from handlers.contract import (
    JSON,
    Call,
    ContractError,
    Exchange,
    ExplainAsked,
    Reply,
    ReplyWriter,
    Running,
    adapter_header,
)
from handlers.deadline import HEADER, NO_DEADLINES, Deadline
from handlers.parsing.json_fields import JsonError, decode_json
from handlers.queue import EngineQueue

# The maximum numbers of prompts, token ids and characters that are shown for a call.
_MOST_PROMPTS, _MOST_IDS, _MOST_CHARACTERS = 8, 10_000, 100_000
_MOST_FIELDS = 64  # The search tests at most this many fields of a body.
_MOST_SECONDS = 2.0  # The time limit of the search, including the wait for the searches of other calls.
# If a body has more than `_SHORT_BODY` bytes, the search cuts its texts and lists to `_SHORT` characters or items.
_SHORT_BODY, _SHORT = 16 * 1024, 1000
# The search tries only integers in this range, because Python refuses to write an integer of more than 4300 digits.
_INTEGERS = range(-(1 << 63), 1 << 64)
_WITH_PARAMETERS = frozenset({"parameters", "sampling_parameters"})  # Objects whose members are parameters.
_LIMIT, _PRIORITY, _SALT = "max_tokens", "priority", "cache_salt"

Answer = Callable[[Call, ReplyWriter], Awaitable[Running | None]]
Place = tuple[str, ...]  # The path of a field in a body: the names from the outermost object inwards.


class ExplainedPrompt(msgspec.Struct, frozen=True):
    """A prompt of a call, and the request that the engine would get for it."""

    text: str | None  # None if the text is decoded from the token ids.
    request: ExplainedRequest
    adapter: str | None = None
    priority: int = 0
    deadline: Deadline | None = None
    streams: bool = False


class Explained(Exception):
    """A call has been explained instead of answered."""

    def __init__(
        self,
        prompts: Sequence[ExplainedPrompt] = (),
        queue: EngineQueue | None = None,
        model_defaults: Collection[str] | None = None,
    ) -> None:
        """Create the explanation.

        Args:
            prompts: The call's prompts.
            queue: The queue of the model's engine. None if the engine would get no request.
            model_defaults: The parameters whose defaults come from the model. None means all parameters that the
                model sets.
        """
        super().__init__("the call was explained")
        self.prompts, self.queue, self.model_defaults = prompts, queue, model_defaults


def explaining(queue: EngineQueue, call: Call) -> EngineQueue:
    """Return a queue for one call that is to be explained.

    The returned queue refuses the call if `queue` would refuse it now. For a variant (`ExplainAsked.variant`), the
    returned queue begins empty: a refusal because of other calls would say nothing about the variant's body.

    Args:
        queue: The queue of the model's engine. It stays unchanged, and the engine's statistics do not count the call.
        call: The call.
    """
    assert call.explanation is not None
    variant = call.explanation.variant
    own = EngineQueue(queue.engine, queue.limit, queue.overload_status, NO_DEADLINES if variant else queue.deadlines)
    own.open_sequences, own.statistics = 0 if variant else queue.open_sequences, EngineStatistics()
    return own


async def prepare(queue: EngineQueue, exchange: Exchange, call: Call) -> NoReturn:
    """Prepare the requests of a parsed call instead of sending them. For a variant, prepare only the first request.

    Args:
        queue: The result of `explaining`.
        exchange: The parsed call.
        call: The call.

    Raises:
        Explained: The requests are prepared. The exception has them.
        RequestError: The call is refused.
    """
    assert call.explanation is not None
    requests = exchange.requests
    places = sum(request.sequences_in_engine for request in requests)
    queue.admit(places)
    queue.open_sequences -= places  # The places are not needed, because nothing is sent.
    deadline = queue.deadline_of(exchange, call)
    preparing = _prepared(queue, requests[:1] if call.explanation.variant else requests, deadline)
    try:
        prompts = await (preparing if deadline is None else deadline.limit(preparing))
    except InvalidParameter as error:
        raise error.renamed(exchange.names) from None
    except (EngineDead, GenerationFailed, Overloaded):
        call.explanation.failed = True
        raise
    raise Explained(prompts, queue, exchange.model_defaults)


async def _prepared(
    queue: EngineQueue, requests: Sequence[GenerationRequest], deadline: Deadline | None
) -> Sequence[ExplainedPrompt]:
    prompts = []
    for place, request in enumerate(requests):
        await give_turn(place)
        explained = await queue.engine.explain(request)
        text = request.prompt if isinstance(request.prompt, str) and request.truncate_prompt_tokens is None else None
        prompts.append(ExplainedPrompt(text, explained, request.adapter, request.priority, deadline, request.stream))
    return prompts


async def explain(call: Call, answer: Answer, writer: ReplyWriter, searches: asyncio.Lock) -> Running | None:
    """Reply to a call with its explanation, or with its refusal if `answer` writes a refusal to `writer`.

    Args:
        call: The call.
        answer: Answers the call, and variants of the call with changed bodies.
        writer: Takes the reply.
        searches: A lock that is held during the search for origins. All models share the event loop, so only one call
            searches at a time.

    Returns:
        The result of `answer` if the route generates nothing: such a route answers as usual. Otherwise None.

    Raises:
        ContractError: The call is refused. The error holds the reply.
        RequestError: The call is refused.
    """
    try:
        return await answer(call, writer)
    except Explained as found:
        explained = found.with_traceback(None)  # A traceback would hold this frame, which holds the exception.
    origins = Origins()
    assert call.explanation is not None
    if not call.explanation.once and not any(prompt.request.media for prompt in explained.prompts):
        origins = await _origins(call, answer, searches)
    document = _document(call, explained, origins)
    writer.reply(Reply(200, JSON, json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")))
    return None


class Origins(msgspec.Struct):
    """The fields of a body, grouped by their effect."""

    known: bool = False  # Whether the search is complete.
    fields: dict[str, list[str]] = {}  # The fields that set a parameter, keyed by the parameter.
    of_prompt: list[str] = []  # The fields that change the prompt.
    without_effect: list[str] = []  # The fields that change nothing in the engine's request.
    unknown: list[str] = []  # The fields whose effect is unknown, usually because all values tried are refused.
    drawn: frozenset[str] = frozenset()  # The parameters with a random value, which differs in each call.


class _EngineFailed(Exception):
    """The engine has failed to prepare a variant."""


async def _origins(call: Call, answer: Answer, searches: asyncio.Lock) -> Origins:
    origins = Origins()
    try:
        async with asyncio.timeout(_MOST_SECONDS), searches:
            await _find(origins, call, answer)
    except (TimeoutError, _EngineFailed):
        pass  # The fields found so far are right. `known` stays False, because there may be more.
    return origins


async def _find(origins: Origins, call: Call, answer: Answer) -> None:
    """Find the effects of the fields of a call's body."""
    is_long = len(call.body) > _SHORT_BODY
    document = await asyncio.to_thread(_read, call.body) if is_long else _read(call.body)
    if not isinstance(document, dict):
        return
    asked, again = await _asked(call, answer, document), await _asked(call, answer, document)
    if asked is None or again is None:
        return
    origins.drawn = _differing(asked, again)
    fields = list(_fields(document))
    for place, value in fields[:_MOST_FIELDS]:
        name, parameters = ".".join(place), frozenset[str]()
        in_prompt = is_without_effect = False
        for other in (*_others(value), None):
            changed = await _asked(call, answer, _with(document, place, other))
            if changed is None or changed.parameters.keys() != asked.parameters.keys():
                continue
            parameters = _differing(asked, changed) - origins.drawn
            in_prompt = changed.token_ids != asked.token_ids
            if parameters or in_prompt:
                break
            # A body without the field proves nothing, because the default may be the same as the field's value. But a
            # field that is null counts as absent, so it has no effect.
            is_without_effect |= other is not None or value is None
        for parameter in sorted(parameters):
            origins.fields.setdefault(parameter, []).append(name)
        if in_prompt:
            origins.of_prompt.append(name)
        if not (parameters or in_prompt):
            (origins.without_effect if is_without_effect else origins.unknown).append(name)
    origins.known = len(fields) <= _MOST_FIELDS


def _read(body: bytes) -> Any:
    """Return the JSON document of a body, or None if the body is not JSON. A long body's texts and lists are cut."""
    try:
        document = decode_json(body)
    except JsonError:
        return None
    return document if len(body) <= _SHORT_BODY else _cut(document)


class _Asked(msgspec.Struct):
    """The request that the engine would get for the first prompt of a call."""

    token_ids: Sequence[int]
    parameters: Mapping[str, Any]


def _differing(asked: _Asked, other: _Asked) -> frozenset[str]:
    """Return the parameters that have different values in the two requests."""
    names = asked.parameters.keys() & other.parameters.keys()
    return frozenset(name for name in names if asked.parameters[name] != other.parameters[name])


async def _asked(call: Call, answer: Answer, document: Any) -> _Asked | None:
    """Return the engine's request for a changed body.

    Return None if the body is refused, or if another handler answers it (`ExplainAsked.way`).

    Raises:
        _EngineFailed: The engine has failed, so the search must end.
    """
    assert call.explanation is not None
    await asyncio.sleep(0)
    variant = ExplainAsked(variant=True)
    other = replace(call, body=msgspec.json.encode(document), explanation=variant, time_limit=None)
    try:
        await answer(other, _Dropped())
    except Explained as explained:
        if explained.prompts and variant.way == call.explanation.way:
            prompt = explained.prompts[0]
            further = {"adapter": prompt.adapter, _PRIORITY: prompt.priority, _SALT: prompt.request.cache_salt}
            return _Asked(prompt.request.token_ids, {**prompt.request.parameters, **further})
    except (ContractError, RequestError):
        pass
    if variant.failed:
        raise _EngineFailed
    return None


def _fields(document: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yield the fields of a body. Instead of an object of parameters, yield its members."""
    for name, value in document.items():
        if name in _WITH_PARAMETERS and isinstance(value, dict):
            yield from (((name, member), given) for member, given in value.items())
        else:
            yield (name,), value


def _with(document: Mapping[str, Any], place: Place, other: Any) -> Mapping[str, Any]:
    """Return a body with another value for a field, or without the field if `other` is None."""
    name, *inner = place
    if inner:
        return {**document, name: _with(document[name], tuple(inner), other)}
    rest = {key: value for key, value in document.items() if key != name}
    return rest if other is None else {**rest, name: other}


def _others(value: Any) -> Sequence[Any]:
    """Return values to try instead of `value`.

    One value is not enough. If `value` is at an end of the parameter's range, some of the results are refused. Some
    results may mean the same as `value`: -1 and 0 both turn `top_k` off, and the engine raises all very low
    temperatures to the same value.
    """
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        near = [other for other in (value + 1, value - 1) if other in _INTEGERS]
        return *near, 0.5, 1
    if isinstance(value, float):
        return value / 2 or 0.5, 0.5
    if isinstance(value, str):
        return (f"{value}a",)
    if isinstance(value, list):  # Only the request of the first prompt is compared.
        return [[first, *value[1:]] for first in _others(value[0])] if value else (["a"], [1])
    return ({"1": 1},) if value == {} else ()


def _cut(value: Any) -> Any:
    """Return a document with each text cut to `_SHORT` characters, and each list to `_SHORT` items."""
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
    if explained.queue is None:
        return document
    queue, first = explained.queue, explained.prompts[0]
    context = queue.engine.max_model_len
    if "beam_width" in first.request.parameters:
        document["because"] = [*document["because"], "a beam search: each step is requests for all copies"]
    characters, ids = _MOST_CHARACTERS, _MOST_IDS
    for prompt in explained.prompts[:_MOST_PROMPTS]:
        token_ids = prompt.request.token_ids[:ids]
        # Only the tokens that are shown are decoded, because decoding 60,000 tokens takes 20 ms.
        whole = prompt.text if prompt.text is not None else queue.engine.texts.decode(token_ids)
        text = whole[:characters]
        is_whole = prompt.text is not None or len(token_ids) == len(prompt.request.token_ids)
        characters, ids = characters - len(text), ids - len(token_ids)
        document["prompts"].append(
            {
                "text": text,
                "characters": len(whole) if is_whole else None,
                "token_ids": token_ids,
                "tokens": len(prompt.request.token_ids),
                "new_tokens": prompt.request.parameters.get(_LIMIT),
                "copy": prompt.request.copy,
                "cached_tokens": prompt.request.cached_tokens,
            }
        )
    of_parameters = {
        name: fields for name, fields in origins.fields.items() if name not in ("adapter", _PRIORITY, _SALT)
    }
    header, body = adapter_header(call), origins.fields.get("adapter", [])
    document["adapter"] = None
    if first.adapter is not None:
        document["adapter"] = _origin(first.adapter, "header" if header else "body", () if header else body)
    document |= {
        "parameters": _parameters(first.request, explained, origins, context - len(first.request.token_ids)),
        "not_held": list(first.request.not_held),
        "priority": _priority(call, first, origins),
        "cache_salt": _salt(call, first.request),
        "deadline": _deadline(call, first),
        "limits": {
            "context_tokens": context,
            "queue_places": queue.limit,
            "free_places": queue.limit - queue.open_sequences,
        },
        "origins_known": origins.known,
        "translated": {
            field: parameters
            for field in sorted({field for fields in of_parameters.values() for field in fields})
            if (parameters := [name for name, fields in of_parameters.items() if field in fields])
            != [field.rpartition(".")[2]]
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
        if name in origins.drawn:
            shown[name] = _origin(None, "random")
            continue
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


def _priority(call: Call, prompt: ExplainedPrompt, origins: Origins) -> Mapping[str, Any]:
    if fields := origins.fields.get(_PRIORITY, ()):
        return _origin(prompt.priority, "body", fields)
    if prompt.priority == call.steering.get("priority"):
        return _origin(prompt.priority, "header")
    return _origin(prompt.priority, "default" if origins.known else None)


def _salt(call: Call, request: ExplainedRequest) -> str | None:
    """Return the origin of the prefix cache's salt, but not the salt, which may be a secret."""
    if not request.cache_salt:
        return None
    if request.cache_salt != call.steering.get("cache_salt"):
        return "body"
    return "key" if request.cache_salt == call.key_salt else "header"


def _deadline(call: Call, prompt: ExplainedPrompt) -> Mapping[str, Any] | None:
    """Return the seconds until the deadline, with their origin."""
    if prompt.deadline is None:
        return None
    seconds = prompt.deadline.seconds
    if seconds == call.time_limit:
        return _origin(seconds, "attribute" if HEADER not in call.headers else "header")
    return _origin(seconds, f"option.{'stream' if prompt.streams else 'answer'}_deadline")


class _Dropped:
    """Implements `ReplyWriter`: drops a reply."""

    def reply(self, reply: Reply) -> None: ...

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None: ...

    def write(self, data: bytes) -> None: ...

    def write_latest(self, part: Callable[[], bytes]) -> None: ...

    def end(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...
