from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from container.http import reply as push
from container.http.reply import HttpReply, RetryAfter
from handlers.contract import Reply, ended_at_deadline


class Server:
    """The `send` of an ASGI server. It keeps the messages, and waits while the client's socket is full."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.writable = asyncio.Event()
        self.writable.set()

    async def send(self, message: Any) -> None:
        await self._drained()
        self.messages.append(message)

    async def _drained(self) -> None:
        if not self.writable.is_set():
            await self.writable.wait()

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.messages if m["type"] == "http.response.body")


def started(*broken_off: Callable[[], None]) -> tuple[Server, HttpReply]:
    """Return a reply that has begun, and the server that sends it."""
    server = Server()
    reply = HttpReply(server.send, [], RetryAfter(), *broken_off)
    reply.start(200, "text/plain")
    return server, reply


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_whole_reply_has_its_length_and_goes_out_at_once() -> None:
    server = Server()
    HttpReply(server.send, [(b"x", b"y")], RetryAfter()).reply(Reply(424, "application/json", b"abc"))
    start, body = server.messages
    assert start["status"] == 424
    assert start["headers"] == [(b"content-type", b"application/json"), (b"content-length", b"3"), (b"x", b"y")]
    assert (body["body"], body["more_body"]) == (b"abc", False)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("own", "ours", "shown"),
    [
        ((), [], [(b"retry-after", b"1")]),
        ((), [(b"retry-after", b"5")], [(b"retry-after", b"5")]),
        ((("Retry-After", "60"),), [], [(b"retry-after", b"60")]),
    ],
)
async def test_a_refusal_for_now_says_when_to_come_again(
    status: int, own: tuple[tuple[str, str], ...], ours: Any, shown: Any
) -> None:
    server = Server()
    HttpReply(server.send, ours, RetryAfter()).reply(Reply(status, "", b"", own))
    assert server.messages[0]["headers"] == [(b"content-length", b"0"), *shown]


async def test_a_call_that_had_nothing_at_its_deadline_is_not_told_to_come_again() -> None:
    server = Server()
    reply = HttpReply(server.send, [], RetryAfter())
    reply.reply(ended_at_deadline(Reply(503, "", b"")))
    assert b"retry-after" not in dict(server.messages[0]["headers"])
    assert reply.ended_at_deadline


async def test_pieces_go_out_one_by_one_without_waiting_for_the_event_loop() -> None:
    server, reply = started()
    for piece in (b"a", b"b"):
        reply.write(piece)
    reply.end(b"c")
    sent = [(message["body"], message["more_body"]) for message in server.messages[1:]]
    assert sent == [(b"a", True), (b"b", True), (b"c", False)]
    assert (reply.status, reply.finished, reply.bytes_sent) == (200, True, 3)


async def test_what_is_written_while_the_client_lags_is_merged_into_one_message() -> None:
    server, reply = started()
    reply.write(b"a")
    server.writable.clear()
    for piece in (b"b", b"c", b"d"):
        reply.write(piece)
    reply.end(b"e")
    assert server.body == b"a"
    server.writable.set()
    await settle()
    assert [m["body"] for m in server.messages[1:]] == [b"a", b"b", b"cde"]
    assert server.messages[-1]["more_body"] is False


async def test_a_client_that_lags_again_and_again_still_gets_everything_in_order() -> None:
    server, reply = started()
    expected = b""
    for number in range(50):
        if number % 3 == 0:
            server.writable.clear()
        reply.write(b"%d," % number)
        expected += b"%d," % number
        if number % 3 == 2:
            server.writable.set()
            await settle()
    server.writable.set()
    await settle()
    reply.end(b"end")
    assert server.body == expected + b"end"
    assert server.messages[-1]["more_body"] is False


async def test_whoever_drains_waits_for_what_was_just_written() -> None:
    server, reply = started()
    server.writable.clear()
    reply.write(b"a")
    drained = asyncio.create_task(reply.drain())
    await settle()
    assert (server.body, drained.done()) == (b"", False)
    reply.write(b"b")
    reply.end(b"c")
    server.writable.set()
    await drained
    assert server.body == b"abc"


async def test_of_parts_that_repeat_each_other_a_client_that_lags_gets_the_latest_alone() -> None:
    made: list[int] = []

    def part(number: int) -> Callable[[], bytes]:
        def make() -> bytes:
            made.append(number)
            return b"%d," % number

        return make

    server, reply = started()
    reply.write_latest(part(0))
    server.writable.clear()
    for number in range(1, 1000):
        reply.write_latest(part(number))
    server.writable.set()
    await settle()
    assert server.body == b"0,1,999,"
    server.writable.clear()
    for number in (1000, 1001, 1002):
        reply.write_latest(part(number))
    reply.end(b"end")
    server.writable.set()
    await settle()
    assert server.body == b"0,1,999,1000,end"
    assert made == [0, 1, 999, 1000]
    assert reply.bytes_sent == len(server.body)


async def test_a_client_that_reads_nothing_is_given_up_once_too_much_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push, "MAX_UNSENT", 1000)
    broken: list[bool] = []
    server, reply = started(lambda: broken.append(True))
    server.writable.clear()
    for _ in range(1000):
        reply.write(b"x" * 100)
    reply.end(b"end")
    assert broken == [True]
    assert len(reply._backlog) == 0
    assert not reply.finished
    whole = HttpReply(server.send, [], RetryAfter(), lambda: broken.append(True))
    whole.reply(Reply(200, "text/plain", b"x" * 5000))
    assert broken == [True]
    server.writable.set()
    await settle()


@pytest.mark.parametrize("lagging", [True, False])
async def test_a_part_that_cannot_be_made_while_the_client_lags_ends_the_reply_and_is_logged(
    lagging: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise ZeroDivisionError("a bug")

    broken_off: list[bool] = []
    server, reply = started(lambda: broken_off.append(True))
    if lagging:
        server.writable.clear()
        reply.write(b"first,")
        reply.write_latest(broken)
        server.writable.set()
        await settle()
        assert broken_off == [True]
        assert "ZeroDivisionError: a bug" in caplog.text
    else:  # the caller of `write_latest` gets the error at once
        with pytest.raises(ZeroDivisionError):
            reply.write_latest(broken)
    await asyncio.wait_for(reply.drain(), 60)
    reply.end(b"end")
    assert reply.finished is not lagging


async def test_a_crowd_that_is_refused_is_to_come_again_later_and_a_few_within_a_second() -> None:
    now = 1000.0
    retry_after = RetryAfter(lambda: now)

    def refused(clients: int) -> int:
        first, *others = [retry_after.header() for _ in range(clients)]
        assert set(others) <= {first}
        return int(first[1])

    assert refused(320) == 1
    now += 1
    assert refused(320) == 5
    now += 5
    assert refused(320) == 5, "as many have come as are known to"
    now += 5
    assert refused(100_000) == 5
    now += 5
    assert refused(1) == 30, "no later than that"
    now += 300
    assert refused(1) == 1


ATTRIBUTES, NOT_HELD = b"x-amzn-sagemaker-custom-attributes", b"x-slipway-not-held"
PLACES = ",".join(f"#/{name}/uniqueItems" for name in "abcd")


@pytest.mark.parametrize(
    ("own", "attributes"),
    [
        ([], f"X-Slipway-Not-Held={PLACES}"),
        ([("x-slipway-deadline", "reached")], f"X-Slipway-Deadline=reached; X-Slipway-Not-Held={PLACES}"),
        ([("X-Amzn-SageMaker-Custom-Attributes", "a=b")], f"a=b; X-Slipway-Not-Held={PLACES}"),
        ([("X-Amzn-SageMaker-Custom-Attributes", "a" * 990)], "a" * 990 + "; X-Slipway-Not-Held=#"),
        ([("X-Amzn-SageMaker-Custom-Attributes", "a" * 1010)], "a" * 1010),
    ],
)
async def test_sagemaker_gets_the_deadline_and_the_parts_that_are_not_held_as_attributes(
    own: list[tuple[str, str]], attributes: str
) -> None:
    server = Server()
    reply = HttpReply(server.send, [], RetryAfter())
    reply.reply(Reply(200, "", b"", (*own, ("x-slipway-not-held", PLACES))))
    headers = dict(server.messages[0]["headers"])
    assert headers[ATTRIBUTES] == attributes.encode()
    assert headers[NOT_HELD] == PLACES.encode()
    assert len(headers[ATTRIBUTES]) <= 1024


async def test_other_replies_have_no_such_attribute() -> None:
    server, _ = started()
    assert ATTRIBUTES not in dict(server.messages[0]["headers"])
