"""The actions against a server under load: faults, and the worst kinds of client behaviour."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from tests.chaos.client import Manner
from tests.chaos.contracts import CONTRACTS
from tests.chaos.load import Load
from tests.chaos.watch import Subject, clock, stopped

HANDLER = Path(__file__).parent.parent / "fixtures" / "handlers" / "echo"
_SLACK = 1.0
"""The number of seconds by which `/ping` may report a stall early.

The stall time counts from the engine's last step, which may be earlier than the fault.
"""
_IDLE_SECONDS = 60.0
"""Once every client has its answer or has left, everything must end within this time."""
_GAUGES = ("slipway_engine_running", "slipway_engine_waiting", "slipway_open_requests")


@dataclass(frozen=True, slots=True)
class Action:
    """An action, which can be written as text and repeated."""

    name: str
    amount: float

    def __str__(self) -> str:
        return f"{self.name}:{self.amount:g}"

    @classmethod
    def read(cls, text: str) -> Action:
        name, _, amount = text.partition(":")
        return cls(name, float(amount))


@dataclass(frozen=True, slots=True)
class Recovery:
    """The times of a recovery after a fault, in seconds. None: not observed."""

    fault: str
    truth: float | None
    """The time until `/ping` reported the fault."""
    service: float | None
    """The time from the end of the fault, or from the new server's start, to the first complete answer."""


class Stage:
    """A server, its load, and the observed recoveries and violations."""

    def __init__(self, subject: Subject, load: Load, random: Random, adapter: Path | None, grace: float) -> None:
        self.subject, self.load, self.random, self.adapter = subject, load, random, adapter
        self.grace = grace
        """The number of seconds within which `/ping` has to report a fault."""
        self.recoveries: list[Recovery] = []
        self.violations: list[str] = []
        self.number = 0

    def error(self, text: str, since: float) -> None:
        """Count an error as a violation, unless the server was disturbed since the given time or its queue was full."""
        if not self.load.truth_since(since).errors and "queue is full" not in text:
            self.violations.append(text)

    async def seen(self, status: int, since: float) -> float | None:
        """Return the seconds until `/ping` answered with this status. None if it did not within 30 seconds."""
        while clock() < since + 30.0:
            if (at := self.subject.watch.first(status, since)) is not None:
                return at - since
            await asyncio.sleep(0.02)
        return None

    async def served(self, since: float) -> float | None:
        """Return the seconds from `since` to the first complete answer. Only requests that were sent after `since`
        count. None if there was no such answer within a minute.
        """
        deadline = clock() + 60.0
        while clock() < deadline:
            if (at := self.load.first_completed(since)) is not None:
                return at - since
            await asyncio.sleep(0.02)
        return None


async def stop(stage: Stage, seconds: float, name: str) -> None:
    """Pause one of the engine's processes for a while. `/ping` has to report a stall after the stall time."""
    truth, stall = stage.subject.truth, stage.subject.stall_timeout
    process = stage.subject.process(name)
    begun = clock()
    truth.is_now(200)
    truth.is_now(200, 500, after=max(stall - _SLACK, 0.0))
    truth.is_now(500, after=stall + stage.grace)
    with stopped([process]):
        await asyncio.sleep(seconds)
        told = await stage.seen(500, begun) if seconds > stall + stage.grace else None
    ended = clock()
    truth.is_now(200, 500)
    truth.is_now(200, after=stage.grace)
    stage.recoveries.append(Recovery(f"{name} stopped", told, await stage.served(ended)))


async def stop_server(stage: Stage, seconds: float, *, whole: bool) -> None:
    """Pause the server's own process, or all processes, as `docker pause` does.

    Clients get no errors because of the pause.
    """
    with stopped(stage.subject.processes() if whole else [stage.subject.process("slipway")]):
        await asyncio.sleep(seconds)
    fault = "all processes stopped" if whole else "server stopped"
    stage.recoveries.append(Recovery(fault, None, await stage.served(clock())))


async def kill(stage: Stage, _: float, name: str) -> None:
    """Kill one of the engine's processes. `/ping` reports the fault until the engine is restarted."""
    truth = stage.subject.truth
    begun = clock()
    truth.is_now(200, 500, errors=True)
    truth.is_now(500, errors=True, after=stage.grace)
    stage.subject.process(name).kill()
    told = await stage.seen(500, begun)
    if stage.subject.engine_restarts:
        await asyncio.to_thread(stage.subject.wait_until_restarted)
        stage.recoveries.append(Recovery(f"{name} killed, started again in place", told, clock() - begun))
        return
    await asyncio.sleep(stage.random.uniform(0.0, 1.0))
    code = await asyncio.to_thread(stage.subject.end, stage.grace)
    if code != 0:
        stage.violations.append(f"exit code {code} of a server whose {name} was killed")
    await _restart(stage, f"{name} killed", told)


async def _restart(stage: Stage, fault: str, told: float | None) -> None:
    began = clock()
    await asyncio.to_thread(stage.subject.restart)
    stage.recoveries.append(Recovery(fault, told, await stage.served(began)))


async def kill_server(stage: Stage, _: float) -> None:
    begun = clock()
    await asyncio.to_thread(stage.subject.kill)
    await _restart(stage, "server killed", await stage.seen(0, begun))


async def terminate(stage: Stage, _: float) -> None:
    """Send SIGTERM while requests run. All of them must still be answered."""
    begun = clock()
    code = await asyncio.to_thread(stage.subject.end, stage.grace)
    if code != 0:
        stage.violations.append(f"exit code {code} after SIGTERM")
    told = stage.subject.watch.first(503, begun)
    await _restart(stage, "SIGTERM", None if told is None else told - begun)


async def crowd(stage: Stage, clients: float, manner: Manner, tokens: tuple[int, int]) -> None:
    """Send concurrent requests, possibly more than fit into the queue."""
    for _ in range(int(clients)):
        contract = stage.random.choice(CONTRACTS)
        stage.load.beside(stage.load.send(contract, stage.random.randint(*tokens), manner, stage.random))


async def model(stage: Stage, calls: float) -> None:
    """Register a second model, call it, and unregister it while some of these calls run."""
    stage.number += 1
    stage.load.beside(_model(stage, f"extra{stage.number}", int(calls)))


async def _model(stage: Stage, name: str, calls: int) -> None:
    begun, load = clock(), stage.load
    status, body = await load.ask(f"/models?url={HANDLER}&model_name={name}&max_worker=1")
    if status != 200:
        stage.error(f"POST /models: {status} {body!r}", begun)
        return
    asked = [
        asyncio.create_task(load.ask(f"/models/{name}/invoke", json.dumps({"text": name}).encode()))
        for _ in range(calls)
    ]
    await asyncio.sleep(stage.random.uniform(0.0, 0.5))
    status, body = await load.ask(f"/models/{name}", method="DELETE")
    if status != 200:
        stage.error(f"DELETE /models: {status} {body!r}", begun)
    for status, body in await asyncio.gather(*asked):
        if status in (404, 503) and {"code", "type", "message"} <= set(json.loads(body)):
            continue  # The call came after the model was removed.
        if status != 200 or name.encode() not in body:
            stage.error(f"a call of a model of the management API: {status} {body!r}", begun)
    status, body = await load.ask(f"/models/{name}", method="GET")
    if status != 404:
        stage.error(f"GET /models of what was unregistered: {status} {body!r}", begun)


async def adapter(stage: Stage, calls: float) -> None:
    """Register an adapter, use it, and remove it while requests that use it run."""
    if stage.adapter is None:
        return
    stage.number += 1
    stage.load.beside(_adapter(stage, f"adapter{stage.number}", int(calls)))


async def _adapter(stage: Stage, name: str, calls: int) -> None:
    begun, load = clock(), stage.load
    status, body = await load.ask(f"/adapters?name={name}&src={stage.adapter}")
    if status != 200:
        stage.error(f"POST /adapters: {status} {body!r}", begun)
        return
    parameters = {"max_new_tokens": 8, "ignore_eos_token": True}
    request = json.dumps({"inputs": "Once", "parameters": parameters, "adapters": name}).encode()
    asked = [asyncio.create_task(load.ask("/invocations", request)) for _ in range(calls)]
    await asyncio.sleep(stage.random.uniform(0.0, 0.5))
    status, body = await load.ask(f"/adapters/{name}", method="DELETE")
    if status != 200:
        stage.error(f"DELETE /adapters: {status} {body!r}", begun)
    for status, body in await asyncio.gather(*asked):
        if status not in (200, 424, 503) or not isinstance(json.loads(body), dict):
            stage.error(f"a call with an adapter: {status} {body!r}", begun)
    status, body = await load.ask("/invocations", request)
    if status != 424:
        stage.error(f"a call with an adapter that was removed: {status} {body!r}", begun)


async def bad_requests(stage: Stage, number: float) -> None:
    """Send bodies that no contract accepts, in addition to the valid requests."""
    for _ in range(int(number)):
        contract = stage.random.choice(CONTRACTS)
        body = stage.random.choice(({}, [], None, "text", {"inputs": 1, "prompt": 1, "text_input": 1, "messages": 1}))
        stage.load.beside(_bad(stage, contract.path, body))


async def _bad(stage: Stage, path: str, body: object) -> None:
    begun = clock()
    status, text = await stage.load.ask(path, json.dumps(body).encode())
    if not 400 <= status < 500:
        stage.error(f"a bad body on {path}: {status} {text!r}", begun)


async def rest(stage: Stage, _: float) -> None:
    """Wait until every client has its answer. After that, no request is allowed to run, and the server has to stay
    healthy for its stall time.
    """
    await stage.load.rest()
    since = clock()
    gauges: dict[str, float] = {}
    while clock() < since + _IDLE_SECONDS:
        status, text = await stage.load.ask("/metrics", method="GET")
        found = re.findall(r"^(slipway_[a-z_]+)(?:\{[^}]*\})? ([0-9.e+]+)$", text.decode(), re.M)
        gauges = {name: float(value) for name, value in found if name in _GAUGES}
        if status == 200 and len(gauges) == len(_GAUGES) and not any(gauges.values()):
            break
        await asyncio.sleep(0.1)
    else:
        stage.violations.append(f"something runs though nobody waits: {gauges}")
    await asyncio.sleep(stage.subject.stall_timeout + _SLACK)
    stage.load.go_on()


@dataclass(frozen=True, slots=True)
class Kind:
    """An action, its weight in the random choice, and the limits for its amount."""

    do: Callable[[Stage, float], Awaitable[None]]
    weight: int
    least: float = 0.0
    most: float = 0.0


KINDS = {
    "fill": Kind(partial(crowd, manner="plain", tokens=(50, 200)), 4, 50, 200),
    "leave": Kind(partial(crowd, manner="leaves", tokens=(500, 500)), 4, 10, 100),
    "read_slowly": Kind(partial(crowd, manner="reads slowly", tokens=(1, 60)), 3, 5, 30),
    "send_slowly": Kind(partial(crowd, manner="sends slowly", tokens=(1, 60)), 3, 5, 30),
    "bad_requests": Kind(bad_requests, 4, 5, 30),
    "model": Kind(model, 4, 1, 20),
    "adapter": Kind(adapter, 4, 1, 20),
    "stop_engine": Kind(partial(stop, name="VLLM::EngineCore"), 2, 0.5, 12.0),
    "stop_worker": Kind(partial(stop, name="VLLM::Worker"), 2, 0.5, 12.0),
    "stop_server": Kind(partial(stop_server, whole=False), 2, 0.5, 8.0),
    "freeze": Kind(partial(stop_server, whole=True), 2, 0.5, 8.0),
    "kill_engine": Kind(partial(kill, name="VLLM::EngineCore"), 1),
    "kill_worker": Kind(partial(kill, name="VLLM::Worker"), 1),
    "kill_fork_server": Kind(partial(kill, name="VLLM::ForkServer"), 1),
    "kill_server": Kind(kill_server, 1),
    "terminate": Kind(terminate, 1),
    "rest": Kind(rest, 3),
}


def random_action(random: Random) -> Action:
    (name,) = random.choices(list(KINDS), [kind.weight for kind in KINDS.values()])
    kind = KINDS[name]
    return Action(name, round(random.uniform(kind.least, kind.most), 1))
