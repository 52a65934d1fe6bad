"""The calls that change adapters, and how all replicas get the same adapters."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from urllib.parse import parse_qs, unquote

import httpx
import pytest

from deploy.ray.adapter_changes import AdapterChange, ChangeLog, Follower, Leader, ReplicaReply, changes_adapters
from tests.waiting import until


def change(method: str, target: str, **body: str | bool) -> AdapterChange:
    headers = ((b"content-type", b"application/json; charset=utf-8"),)
    return AdapterChange(method, target.encode(), headers, json.dumps(body).encode(), "main")


def load(name: str, path: str = "/a", **more: bool) -> AdapterChange:
    return change("POST", "/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)


def unload(name: str) -> AdapterChange:
    return change("POST", "/v1/unload_lora_adapter", lora_name=name)


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
        (load("a"), ("main", "a")),
        (change("POST", "/adapters", name="a", src="/x"), ("main", "a")),
        (change("POST", "/models/m/adapters?name=x", name="a"), ("m", "a")),
        (AdapterChange("POST", b"/adapters?name=a&src=/x", (), b"", "main"), ("main", "a")),
        (AdapterChange("POST", b"/adapters?name=a", (), b'{"name": "no JSON by its type"}', "main"), ("main", "a")),
        (change("DELETE", "/models/m%20n/adapters/a?y"), ("m n", "a")),
        (change("DELETE", "/adapters/a%2Fb"), ("main", "a/b")),
        (change("POST", "/adapters/a/update", src="/y"), ("main", "a")),
        (AdapterChange("POST", b"/v1/load_lora_adapter", (), b"[1]", "main"), ("main", "")),
    ],
)
def test_a_change_says_which_adapter_it_is_of(call: AdapterChange, adapter: tuple[str, str]) -> None:
    assert call.adapter == adapter


def test_an_adapter_that_comes_and_goes_leaves_one_change_behind() -> None:
    log = ChangeLog()
    for _ in range(100):
        log = log.with_change(load("a"))
        log = log.with_change(gone := unload("a"))
    assert log == (200, (gone,))


def test_an_update_needs_the_registration_before_it() -> None:
    registered, updated = change("POST", "/adapters", name="a"), change("POST", "/adapters/a/update", pin=True)
    log = ChangeLog().with_change(registered).with_change(updated)
    assert log.changes == (registered, updated)
    assert log.with_change(again := change("POST", "/adapters", name="a")).changes == (again,)


class Machine:
    """A replica that stores the path of each adapter. Like a server, it knows nothing of the other replicas."""

    def __init__(self, name: str, **at_start: str) -> None:
        self.adapters = dict(at_start)
        self.missing: set[str] = set()  # Paths that this machine does not have.
        self.stays: set[str] = set()  # Adapters that it does not remove.
        self.held = asyncio.Event()
        self.held.set()
        self.calls = 0
        own = httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://replica")
        self.follower = Follower(own, name, {("main", adapter): path for adapter, path in at_start.items()})

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.calls += 1
        await self.held.wait()
        path = request.url.path
        if path.startswith("/v1/"):
            body = json.loads(request.content)
            if path == "/v1/unload_lora_adapter":
                return self.remove(body["lora_name"])
            return self.register(body["lora_name"], body["lora_path"], replacing=body.get("load_inplace", False))
        assert path.startswith("/models/main/adapters")
        if request.method == "DELETE":
            return self.remove(unquote(path.rpartition("/")[2]))
        query = {name: values[0] for name, values in parse_qs(request.url.query.decode()).items()}
        return self.register(query["name"], query["src"])

    def remove(self, name: str) -> httpx.Response:
        if name in self.stays:
            return httpx.Response(424, text="it stays")
        return httpx.Response(200 if self.adapters.pop(name, None) else 404, text=f"{name} removed")

    def register(self, name: str, path: str, *, replacing: bool = False) -> httpx.Response:
        if path in self.missing:
            return httpx.Response(404, text=f"{path} is not there")
        if name in self.adapters and not replacing:
            return httpx.Response(400, text=f"{name} is taken")
        self.adapters[name] = path
        return httpx.Response(200, text="done")


class Cluster:
    """The replicas and the leader, which is Ray's actor in a real cluster."""

    def __init__(self, *machines: Machine) -> None:
        self.machines = list(machines)
        self.leader = Leader(self.broadcast)
        self.sent = 0
        # Returns True for the number of each message of the leader that never reaches the second replica.
        self.lost: Callable[[int], bool] = lambda number: False

    async def broadcast(self, log: ChangeLog, change: AdapterChange | None) -> list[ReplicaReply | BaseException]:
        self.sent += 1
        lost = self.lost(self.sent)

        async def deliver(machine: Machine) -> ReplicaReply | None:
            if lost and machine is self.machines[1]:
                raise ConnectionError("the replica cannot be reached")
            if change is None:
                return await machine.follower.follow(log)
            made: ReplicaReply = pickle.loads(
                pickle.dumps(await machine.follower.make(*pickle.loads(pickle.dumps((log, change)))))
            )
            return made

        replies = await asyncio.gather(*map(deliver, self.machines), return_exceptions=True)
        return [answer for answer in replies if answer is not None]

    async def send(self, change: AdapterChange, to: int = 0) -> tuple[int, str] | None:
        made = await self.leader.change(change, self.machines[to].follower.known)
        return None if made is None else (made.status, made.body.decode())

    async def catch_up(self, machine: Machine) -> None:
        await machine.follower.follow(await self.leader.log(machine.follower.known))

    def adapters(self) -> list[dict[str, str]]:
        return [machine.adapters for machine in self.machines]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(Machine("one"), Machine("two"))


@pytest.mark.asyncio
async def test_all_replicas_have_what_one_was_told_and_so_has_one_that_starts_later(cluster: Cluster) -> None:
    assert await cluster.send(load("a")) == (200, "done")
    assert await cluster.send(load("b"), to=1) == (200, "done")
    assert await cluster.send(unload("a"), to=1) == (200, "a removed")
    assert await cluster.send(load("a", "/new")) == (200, "done")
    cluster.machines.append(Machine("three"))
    await cluster.catch_up(cluster.machines[2])
    assert cluster.adapters() == [{"a": "/new", "b": "/a"}] * 3
    assert await cluster.send(unload("c")) == (404, "c removed")


@pytest.mark.asyncio
async def test_of_two_registrations_of_a_name_at_a_time_one_is_made_by_all_and_the_other_by_none() -> None:
    for _ in range(10):
        cluster = Cluster(Machine("one"), Machine("two"))
        replies = await asyncio.gather(cluster.send(load("a", "/x"), 0), cluster.send(load("a", "/y"), 1))
        assert sorted(map(str, replies)) == ["(200, 'done')", "(400, 'a is taken')"]
        assert cluster.adapters() in ([{"a": "/x"}] * 2, [{"a": "/y"}] * 2)


@pytest.mark.asyncio
async def test_what_one_replica_cannot_do_is_undone_on_the_others_and_is_the_answer(cluster: Cluster) -> None:
    cluster.machines[1].missing = {"/a"}
    assert await cluster.send(load("a")) == (404, "/a is not there")
    assert cluster.adapters() == [{}, {}]
    cluster.machines[1].missing = set()
    assert await cluster.send(load("a")) == (200, "done")
    assert cluster.adapters() == [{"a": "/a"}] * 2


@pytest.mark.asyncio
async def test_an_adapter_that_cannot_be_replaced_everywhere_is_the_former_one_everywhere() -> None:
    cluster = Cluster(Machine("one", own="/start"), Machine("two", own="/start"))
    await cluster.send(load("a", "/x"))
    for name, former in (("a", "/x"), ("own", "/start")):
        cluster.machines[1].missing = {"/y"}
        assert await cluster.send(load(name, "/y", load_inplace=True)) == (404, "/y is not there")
        assert [adapters[name] for adapters in cluster.adapters()] == [former] * 2
    cluster.machines[1].stays = {"a", "own"}
    for name in ("a", "own"):
        assert await cluster.send(unload(name)) == (424, "it stays")
    assert cluster.adapters() == [{"a": "/x", "own": "/start"}] * 2


@pytest.mark.asyncio
async def test_an_adapter_of_the_start_that_was_removed_or_replaced_is_so_on_a_replica_that_starts_later() -> None:
    cluster = Cluster(Machine("one", a="/start", b="/start", c="/start"))
    await cluster.send(unload("a"))
    await cluster.send(unload("b"))
    await cluster.send(load("b", "/new"))
    later = Machine("two", a="/start", b="/start", c="/start")
    await cluster.catch_up(later)
    assert later.adapters == cluster.machines[0].adapters == {"b": "/new", "c": "/start"}


@pytest.mark.asyncio
async def test_a_replica_that_misses_words_has_the_same_after_it_has_caught_up(cluster: Cluster) -> None:
    await cluster.send(load("a", "/x"))
    cluster.lost = lambda number: number > 1
    assert await cluster.send(load("b")) is None
    assert cluster.adapters() == [{"a": "/x"}] * 2, "no replica keeps what one of them has not replied to"
    cluster.lost = lambda number: False
    for missed in (unload("a"), load("a", "/y")):
        cluster.machines[1:], away = [], cluster.machines[1]
        await cluster.send(missed)
        cluster.machines.append(away)
    await cluster.catch_up(cluster.machines[1])
    assert cluster.adapters() == [{"a": "/y"}] * 2


@pytest.mark.asyncio
async def test_a_word_to_undo_that_is_lost_is_made_up_for(cluster: Cluster) -> None:
    cluster.machines[0].missing = {"/a"}
    cluster.lost = lambda number: number == 2
    assert await cluster.send(load("a")) == (404, "/a is not there")
    assert cluster.adapters() == [{}, {"a": "/a"}]
    await cluster.catch_up(cluster.machines[1])
    assert cluster.adapters() == [{}, {}]


@pytest.mark.asyncio
async def test_what_a_replica_cannot_catch_up_with_is_tried_again_and_keeps_nothing_else_back(cluster: Cluster) -> None:
    await cluster.send(load("a", "/x"))
    await cluster.send(load("b", "/y"))
    later = Machine("three")
    later.missing = {"/x"}
    await cluster.catch_up(later)
    assert later.adapters == {"b": "/y"}
    later.missing = set()
    await cluster.catch_up(later)
    assert later.adapters == {"a": "/x", "b": "/y"}
    calls = later.calls
    await cluster.catch_up(later)
    assert later.calls == calls


@pytest.mark.asyncio
async def test_a_leader_that_was_lost_gets_its_log_back_from_the_replicas(cluster: Cluster) -> None:
    await cluster.send(load("a"))
    cluster.leader = Leader(cluster.broadcast)
    assert await cluster.send(load("b"), to=1) == (200, "done")
    cluster.leader = Leader(cluster.broadcast)
    await cluster.catch_up(cluster.machines[0])
    cluster.machines.append(Machine("three"))
    await cluster.catch_up(cluster.machines[2])
    assert cluster.adapters() == [{"a": "/a", "b": "/a"}] * 3


@pytest.mark.asyncio
async def test_a_replica_that_lacks_an_adapter_gives_a_new_leader_no_log(cluster: Cluster) -> None:
    assert await cluster.send(load("a")) == (200, "done")
    late = Machine("late")
    late.missing.add("/a")
    cluster.machines.append(late)
    await cluster.catch_up(late)
    cluster.leader = Leader(cluster.broadcast)
    await cluster.catch_up(late)
    await cluster.catch_up(cluster.machines[0])
    late.missing.clear()
    await cluster.catch_up(late)
    assert cluster.adapters() == [{"a": "/a"}] * 3


@pytest.mark.asyncio
async def test_a_replica_that_catches_up_while_a_change_is_being_made_undoes_nothing_of_it(cluster: Cluster) -> None:
    one, two = cluster.machines
    before = await cluster.leader.log(one.follower.known)
    two.held.clear()
    sending = asyncio.create_task(cluster.send(load("a")))
    await until(lambda: one.adapters == {"a": "/a"} and two.calls == 1)
    await one.follower.follow(before)
    catching_up = asyncio.create_task(cluster.catch_up(one))
    await asyncio.sleep(0)
    two.held.set()
    assert await sending == (200, "done")
    await catching_up
    assert cluster.adapters() == [{"a": "/a"}] * 2


@pytest.mark.asyncio
async def test_a_client_that_leaves_leaves_no_half_of_a_change(cluster: Cluster) -> None:
    cluster.machines[1].held.clear()
    going = asyncio.create_task(cluster.send(load("a")))
    await until(lambda: cluster.machines[1].calls == 1)
    going.cancel()
    cluster.machines[1].held.set()
    await until(lambda: [len(machine.follower.log.changes) for machine in cluster.machines] == [1, 1])
    assert cluster.adapters() == [{"a": "/a"}] * 2


@pytest.mark.asyncio
async def test_a_replica_completes_and_then_undoes_a_change_that_its_leader_gave_up(cluster: Cluster) -> None:
    slow = cluster.machines[1]
    slow.held.clear()
    making = asyncio.create_task(slow.follower.make(ChangeLog(), load("a")))
    await until(lambda: slow.calls == 1)
    making.cancel()
    undoing = asyncio.create_task(slow.follower.follow(ChangeLog(1)))
    slow.held.set()
    await undoing
    assert (slow.adapters, slow.follower.log) == ({}, ChangeLog(1))
