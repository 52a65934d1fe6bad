"""Which calls change adapters, and which of them a replica that starts later has to carry out."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator

import httpx
import pytest

from deploy.ray.changes import Change, Changes, Failure, ReplicaChanges, changes_adapters
from tests.waiting import until


def change(method: str, target: str, **body: str) -> Change:
    return Change(method, target.encode(), (), json.dumps(body).encode())


def load(name: str, path: str = "/a") -> Change:
    return change("POST", "/v1/load_lora_adapter", lora_name=name, lora_path=path)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/load_lora_adapter", True),
        ("POST", "/v1/unload_lora_adapter", True),
        ("POST", "/adapters", True),
        ("DELETE", "/adapters/a", True),
        ("POST", "/adapters/a/update", True),
        ("POST", "/models/m/adapters", True),
        ("DELETE", "/models/m/adapters/a", True),
        ("GET", "/adapters", False),
        ("GET", "/models/m/adapters/a", False),
        ("POST", "/models/m", False),
        ("POST", "/models/m/invoke", False),
        ("POST", "/v1/completions", False),
    ],
)
def test_calls_that_change_adapters(method: str, path: str, expected: bool) -> None:
    assert changes_adapters(method, path.encode()) is expected


@pytest.mark.parametrize(
    ("call", "adapter"),
    [
        (load("a"), ("", "a")),
        (change("POST", "/adapters", name="a", src="/x"), ("", "a")),
        (change("POST", "/models/m/adapters?x=1", name="a"), ("m", "a")),
        (Change("POST", b"/adapters?name=a&src=/x", (), b""), ("", "a")),
        (change("DELETE", "/models/m/adapters/a?y"), ("m", "a")),
        (change("DELETE", "/adapters/a%2Fb"), ("", "a/b")),
        (change("POST", "/adapters/a/update", src="/y"), ("", "a")),
    ],
)
def test_a_change_says_which_adapter_it_is_of(call: Change, adapter: tuple[str, str]) -> None:
    assert call.adapter == adapter


def test_a_replica_gets_what_came_after_what_it_has() -> None:
    changes = Changes()
    first, second = load("a"), load("b")
    assert [changes.add(first), changes.add(second)] == [1, 2]
    assert changes.since(0) == (2, [(1, first), (2, second)])
    assert changes.since(1) == (2, [(2, second)])
    assert changes.since(2) == (2, [])


def test_an_adapter_that_comes_and_goes_leaves_one_change_behind() -> None:
    changes = Changes()
    for _ in range(100):
        changes.add(load("a"))
        changes.add(change("POST", "/v1/unload_lora_adapter", lora_name="a"))
    last, left = changes.since(0)
    assert last == 200
    assert [(number, call.target) for number, call in left] == [(200, b"/v1/unload_lora_adapter")]


def test_an_update_needs_the_registration_before_it() -> None:
    changes = Changes()
    registered, updated = change("POST", "/adapters", name="a"), change("POST", "/adapters/a/update", src="/y")
    changes.add(registered)
    changes.add(updated)
    assert changes.since(0)[1] == [(1, registered), (2, updated)]
    again = change("POST", "/adapters", name="a")
    changes.add(again)
    assert changes.since(0)[1] == [(3, again)]


def test_a_replica_brings_back_what_was_lost() -> None:
    replica, actor = Changes(), Changes()
    replica.add(load("a"), 7)
    actor.restore(*replica.since(0))
    assert actor.since(0) == (7, [(7, load("a"))])
    actor.add(load("b"))
    actor.restore(*replica.since(0))
    assert actor.last == 8


class Log:
    """The actor's part, without the actor."""

    def __init__(self) -> None:
        self.changes = Changes()

    async def add(self, change: Change) -> int:
        return self.changes.add(change)

    async def since(self, number: int) -> tuple[int, list[tuple[int, Change]]]:
        return self.changes.since(number)

    async def restore(self, last: int, changes: list[tuple[int, Change]]) -> None:
        self.changes.restore(last, changes)


class Cluster:
    """Replicas that keep adapters in a set; `missing` has those that one of them cannot load."""

    def __init__(self) -> None:
        self.log, self.replicas = Log(), list[ReplicaChanges]()
        self.loaded: list[set[str]] = []

    def start(self, missing: str = "") -> ReplicaChanges:
        loaded: set[str] = set()

        def answer(request: httpx.Request) -> httpx.Response:
            name = json.loads(request.content)["lora_name"]
            if name == missing or (name in loaded) == request.url.path.startswith("/v1/load"):
                return httpx.Response(404, text=f"{name} cannot be had")
            loaded.symmetric_difference_update({name})
            return httpx.Response(200, text="done")

        own = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://replica")
        self.loaded.append(loaded)
        self.replicas.append(ReplicaChanges(own, self.log, self.tell))
        return self.replicas[-1]

    async def tell(self) -> list[list[Failure] | BaseException]:
        answers = [await replica.catch_up() for replica in self.replicas]
        return [RuntimeError("a replica has died"), *pickle.loads(pickle.dumps(answers))]


async def send(replica: ReplicaChanges, name: str, path: bytes = b"/v1/load_lora_adapter") -> tuple[int, str]:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"lora_name": '
        yield json.dumps(name).encode() + b"}"

    reply = await replica.change("POST", path, [(b"host", b"x"), (b"content-type", b"application/json")], body())
    return reply.status_code, reply.text


UNLOAD = b"/v1/unload_lora_adapter"


@pytest.mark.asyncio
async def test_all_replicas_have_what_one_was_told_and_so_has_one_that_starts_later() -> None:
    cluster = Cluster()
    first, second = cluster.start(), cluster.start()
    assert await send(first, "a") == (200, "done")
    assert await send(second, "b") == (200, "done")
    assert await send(second, "a", UNLOAD) == (200, "done")
    assert cluster.loaded == [{"b"}, {"b"}]
    await send(first, "a")
    await cluster.start().catch_up()
    assert cluster.loaded[2] == {"a", "b"}


@pytest.mark.asyncio
async def test_what_one_replica_cannot_do_is_the_answer_and_what_the_first_cannot_goes_to_no_other() -> None:
    cluster = Cluster()
    first, second = cluster.start(), cluster.start(missing="a")
    assert await send(first, "a") == (404, "a cannot be had")
    assert cluster.loaded == [{"a"}, set()]
    assert await send(first, "b") == (200, "done")
    assert await send(second, "a") == (404, "a cannot be had")
    assert await send(first, "c", UNLOAD) == (404, "c cannot be had")
    assert cluster.log.changes.last == 2


@pytest.mark.asyncio
async def test_changes_at_the_same_time_are_done_everywhere() -> None:
    cluster = Cluster()
    replicas = [cluster.start(), cluster.start()]
    replies = await asyncio.gather(*(send(replicas[n % 2], str(n)) for n in range(20)))
    assert set(replies) == {(200, "done")}
    assert cluster.loaded[0] == cluster.loaded[1] == {str(n) for n in range(20)}


@pytest.mark.asyncio
async def test_a_client_that_leaves_leaves_no_replica_without_the_adapter() -> None:
    cluster = Cluster()
    first = cluster.start()
    cluster.start()
    going = asyncio.create_task(send(first, "a"))
    await asyncio.sleep(0)
    going.cancel()
    await until(lambda: cluster.loaded == [{"a"}, {"a"}])
