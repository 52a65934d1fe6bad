"""A route whose client leaves before its call reaches the engine."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from container.http.request_head import RequestHead
from container.http.route import AppState, HttpCounts, HttpRoute
from container.http.router import Router
from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from engines.errors import GenerationFailed, RequestError, UnknownModel
from handlers.contract import Call, Reply, ReplyWriter, Running
from tests.freed import when_freed
from tests.stand_ins.answering_route import Answering, answering_route, contract_with

SCOPE = {"type": "http", "headers": [], "query_string": b"", "method": "POST", "path": "/x", "raw_path": b"/x"}


class Counts(HttpCounts):
    def __init__(self) -> None:
        super().__init__()
        self.statuses: list[int] = []

    def count(self, route: str, status: int, seconds: float) -> None:
        self.statuses.append(status)


class Client:
    """A client that sends an empty body. It leaves when a test sets `left`, or when it has its reply."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._asked = 0

    async def receive(self) -> dict[str, Any]:
        self._asked += 1
        if self._asked == 1:
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.left.set()


class Generating:
    request_id = "r"

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def route(answer: Answering) -> tuple[Router, Counts]:
    counts = Counts()
    return answering_route(AppState(Models(), ServerConfig(), counts), answer), counts


async def asked(served: Router, client: Client) -> None:
    await asyncio.wait_for(served(SCOPE, client.receive, client.send), 60)


async def test_a_call_whose_client_leaves_while_it_waits_is_cancelled() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(call: Call, writer: ReplyWriter) -> Running | None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return None

    client, (served, counts) = Client(), route(answer)
    serving = asyncio.create_task(asked(served, client))
    await asyncio.wait_for(begun.wait(), 60)
    assert not cancelled.is_set()
    client.left.set()
    await serving
    assert cancelled.is_set()
    assert (counts.statuses, client.sent) == ([499], [])


async def test_a_call_that_waited_and_then_runs_is_cancelled_when_its_client_leaves_later() -> None:
    running, started = Generating(), asyncio.Event()

    async def answer(call: Call, writer: ReplyWriter) -> Running | None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        writer.start(200, "text/plain")
        started.set()
        return running

    client, (served, _) = Client(), route(answer)
    serving = asyncio.create_task(asked(served, client))
    await asyncio.wait_for(started.wait(), 60)
    assert running.cancelled == 0
    client.left.set()
    await serving
    assert running.cancelled == 1


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("refuses", "status", "body"), [(False, 200, b"whole"), (True, 424, b"no")])
async def test_replies_and_refusals_are_the_same_whether_or_not_a_call_waits(
    waits: bool, refuses: bool, status: int, body: bytes
) -> None:
    async def answer(call: Call, writer: ReplyWriter) -> Running | None:
        if waits:
            await asyncio.sleep(0.01)
        if refuses:
            raise GenerationFailed("no")
        writer.reply(Reply(200, "text/plain", b"whole"))
        return None

    client, (served, counts) = Client(), route(answer)
    await asked(served, client)
    assert (counts.statuses, client.sent[-1]["body"]) == ([status], body)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_fault_while_the_model_is_looked_up_is_an_internal_error_in_the_form_of_the_route() -> None:
    class Route(HttpRoute):
        def find(self, head: RequestHead) -> Model:
            raise ZeroDivisionError("a bug with a secret")

    def refuse(error: RequestError) -> Reply:
        return Reply(500, "text/plain", type(error).__name__.encode())

    counts = Counts()
    route = Route(AppState(Models(), ServerConfig(), counts), contract_with(refuse), "/x")
    client = Client()
    await asked(Router(route), client)
    assert (counts.statuses, client.sent[-1]["body"]) == ([500], b"InternalError")


async def test_an_error_of_the_look_up_of_a_model_is_freed_with_the_request() -> None:
    freed: list[threading.Event] = []

    def unknown() -> UnknownModel:
        error = UnknownModel("m", "there is no such model")
        freed.append(when_freed(error))
        return error

    class Route(HttpRoute):
        def find(self, head: RequestHead) -> Model:
            raise unknown()

    contract = contract_with(lambda error: Reply(404, "text/plain", error.message.encode()))
    route, client = Route(AppState(Models(), ServerConfig(), Counts()), contract, "/x"), Client()
    gc.disable()
    try:
        await asked(Router(route), client)
        assert client.sent[0]["status"] == 404
        assert freed[0].is_set()
    finally:
        gc.enable()
