"""Reading bodies: the memory for all bodies together, and the rate at which each body has to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.http.body_limits import UNCOUNTED, BodyMemory, BodyReader, announced_size
from container.http.custom_attributes import CUSTOM_ATTRIBUTES
from container.http.route import AppState, HttpCounts
from container.http.router import Router
from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from engines.errors import BodyTimeout, BodyTooLarge, Overloaded
from handlers.contract import Call, Reply, ReplyWriter
from tests.stand_ins.answering_route import answering_route, model_with

MOST = 1 << 20
PIECE = UNCOUNTED


def memory(limit: int, most: int = MOST) -> BodyMemory:
    return BodyMemory(ServerConfig(max_request_memory=limit, max_request_size=most, throttle_error_http_code=429))


class Sender:
    """A client that sends pieces. After the last piece, it waits, ends the body, or leaves."""

    def __init__(self, pieces: Sequence[bytes], *, ends: bool = True, leaves: bool = False) -> None:
        self.pieces, self._ends, self._leaves = list(pieces), ends, leaves

    async def receive(self) -> MutableMapping[str, Any]:
        if self.pieces:
            piece = self.pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.pieces) or not self._ends}
        if not self._leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}


async def read(reader: BodyReader, sender: Sender, seconds: float = 60.0) -> bytes | None:
    return await reader.read({}, sender.receive, MOST, seconds)


@pytest.mark.parametrize(("text", "size"), [(b"", 0), (b"0" * 5000 + b"2", 2), (b"x", 0)])
async def test_a_length_may_have_any_number_of_digits(text: bytes, size: int) -> None:
    assert announced_size({b"content-length": text}) == size


async def test_a_body_of_unknown_length_may_have_the_limit_and_not_a_byte_more() -> None:
    longest = [b"x" * PIECE, b"y" * (MOST - PIECE)]
    assert await read(BodyReader(None), Sender(longest)) == b"".join(longest)
    with pytest.raises(BodyTooLarge, match=str(MOST)):
        await read(BodyReader(None), Sender([*longest, b"z"]))


async def test_a_long_body_counts_until_it_is_let_go() -> None:
    of_all = memory(MOST)
    reader = BodyReader(of_all)
    body = await read(reader, Sender([b"x" * PIECE, b"y" * PIECE, b"z"]))
    assert body == b"x" * PIECE + b"y" * PIECE + b"z"
    assert of_all.used == 2 * PIECE + 1
    reader.let_go()
    reader.let_go()
    assert of_all.used == 0


async def test_a_body_that_comes_when_the_memory_is_used_up_is_refused_and_others_are_read_on() -> None:
    of_all = memory(MOST)
    first, second = BodyReader(of_all), BodyReader(of_all)
    await read(first, Sender([b"x" * (MOST - PIECE)]))
    with pytest.raises(Overloaded, match="max_request_memory") as refused:
        await read(second, Sender([b"x" * PIECE, b"x" * PIECE], ends=False))
    assert refused.value.status == 429
    second.let_go()
    assert of_all.used == MOST - PIECE
    first.let_go()
    assert await read(second, Sender([b"x" * PIECE, b"x" * PIECE])) is not None


async def test_one_body_always_fits() -> None:
    assert memory(1, MOST).limit == MOST
    assert BodyMemory(ServerConfig()).limit >= ServerConfig().max_request_size


@given(sizes=st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=8), leaves=st.booleans())
async def test_all_of_it_comes_back_whatever_ends_the_request(sizes: list[int], leaves: bool) -> None:
    of_all = memory(MOST)
    reader = BodyReader(of_all)
    sender = Sender([b"x" * size for size in sizes], ends=not leaves, leaves=leaves)
    try:
        body = await read(reader, sender)
    except BodyTooLarge:
        assert sum(sizes) > MOST
    else:
        assert body is None if leaves else len(body or b"") == sum(sizes)
    reader.let_go()
    assert of_all.used == 0


async def test_a_body_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("container.http.body_limits.LEAST_RATE", 1_000_000)
    monkeypatch.setattr("container.http.body_limits.GRACE_SECONDS", 0.2)
    sent = 0

    async def receive() -> MutableMapping[str, Any]:
        nonlocal sent
        await asyncio.sleep(0.01)
        sent += 1
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(BodyTimeout, match="1000000"):
        await BodyReader(None).read({}, receive, MOST, 60.0)
    assert sent


class Service:
    """A model's service with a full queue."""

    asked = 0

    def refuse_if_full(self) -> None:
        self.asked += 1
        raise Overloaded("the queue is full")


async def post(
    route: Router, sender: Sender, length: int, headers: Sequence[tuple[bytes, bytes]] = ()
) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "headers": [(b"content-length", str(length).encode()), *headers],
        "query_string": b"",
        "method": "POST",
        "path": "/x",
        "raw_path": b"/x",
    }
    await route(scope, sender.receive, send)
    return sent


def status(error: Any) -> int:
    return int(getattr(error, "status", 400))


def route(state: AppState, status_of_reply: int = 200, model: Model | None = None) -> tuple[Router, list[int]]:
    """Return an application and a list. For each answer, the size of the body and the memory in use are appended."""
    answered: list[int] = []

    async def answer(call: Call, reply: ReplyWriter) -> None:
        answered.append(len(call.body))
        answered.append(state.bodies.used)
        reply.reply(Reply(status_of_reply, "", b""))

    return answering_route(state, answer, status=status, model=model, queued=model is not None), answered


async def test_a_long_body_is_not_read_while_the_queue_is_full() -> None:
    service = Service()
    application, answered = route(AppState(Models(), ServerConfig(), HttpCounts()), model=model_with(service))
    unread = Sender([b"x" * PIECE, b"x"])
    refused = await post(application, unread, PIECE + 1)
    assert refused[0]["status"] == 503
    headers = dict(refused[0]["headers"])
    assert headers[b"connection"] == b"close"
    assert b"retry-after" in headers
    assert len(unread.pieces) == 2
    assert (await post(application, Sender([b"x"]), 1))[0]["status"] == 200
    assert (answered, service.asked) == ([1, 0], 1)


@pytest.mark.parametrize("asking", [(b"x-slipway-explain", b"1"), (CUSTOM_ATTRIBUTES, b"explain=1")])
async def test_a_long_body_that_is_explained_is_the_handlers_to_refuse(asking: tuple[bytes, bytes]) -> None:
    service = Service()
    application, answered = route(AppState(Models(), ServerConfig(), HttpCounts()), 429, model_with(service))
    sent = await post(application, Sender([b"x" * PIECE, b"x"]), PIECE + 1, [asking])
    assert (sent[0]["status"], answered[0], service.asked) == (429, PIECE + 1, 0)


async def test_a_route_gives_the_memory_back_when_the_reply_is_complete() -> None:
    state = AppState(Models(), ServerConfig(), HttpCounts())
    application, answered = route(state)
    await post(application, Sender([b"x" * PIECE, b"y"]), PIECE + 1)
    assert answered == [PIECE + 1] * 2
    assert state.bodies.used == 0


async def test_a_route_says_in_its_contract_that_there_is_no_memory() -> None:
    server_config = ServerConfig(max_request_memory=1, max_request_size=2 * PIECE, throttle_error_http_code=429)
    state = AppState(Models(), server_config, HttpCounts())

    state.bodies.take(PIECE)
    application, answered = route(state)
    sent = await post(application, Sender([b"x" * PIECE, b"y"], ends=False), PIECE + 1)
    assert answered == []
    assert sent[0]["status"] == 429
    assert dict(sent[0]["headers"])[b"connection"] == b"close"
    assert state.bodies.used == PIECE
