"""Who waits for a trial, for how long, and what becomes of the others; the process itself is scripted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("llguidance")

from handlers.engines.vllm import constraints as grammar_trials
from handlers.engines.vllm.constraints import PROCESSES, TOO_MUCH, GrammarTrials
from handlers.errors import EngineDead, Overloaded

pytestmark = pytest.mark.asyncio


class Asked:
    """Stands for the processes: keeps what they are asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = asyncio.Event()

    async def error(self, message: dict[str, str]) -> str | None:
        self.texts.append(message["text"])
        await self.go_on.wait()
        return None

    async def stop(self) -> None: ...


@pytest.fixture
def trials() -> GrammarTrials:
    return GrammarTrials("{}", 1, None)


def scripted(trials: GrammarTrials) -> Asked:
    asked = Asked()
    processes: list[Any] = [asked] * PROCESSES
    trials._processes, trials._idle = processes, list(processes)
    return asked


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_so_many_are_tried_at_a_time_and_further_ones_than_may_wait_are_refused(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(trials)
    monkeypatch.setattr(grammar_trials, "MOST_WAITING", 3)
    waiting = [asyncio.create_task(trials.error("regex", str(i))) for i in range(PROCESSES + 3)]
    await settle()
    assert asked.texts == ["0", "1"]
    with pytest.raises(Overloaded, match="wait to be compiled"):
        await trials.error("regex", "one more")
    asked.go_on.set()
    assert await asyncio.gather(*waiting) == [None] * 5


async def test_a_constraint_that_has_waited_too_long_is_refused(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(trials)
    monkeypatch.setattr(grammar_trials, "WAIT_SECONDS", 0.05)
    running = [asyncio.create_task(trials.error("regex", str(i))) for i in range(PROCESSES)]
    await settle()
    with pytest.raises(Overloaded, match=r"has waited 0\.05 s"):
        await trials.error("regex", "late")
    asked.go_on.set()
    await asyncio.gather(*running)
    assert await trials.error("regex", "late") is None


async def test_what_nobody_waits_for_any_more_is_not_tried(trials: GrammarTrials) -> None:
    asked = scripted(trials)
    tasks = [asyncio.create_task(trials.error("regex", str(i))) for i in range(PROCESSES + 1)]
    stays = asyncio.create_task(trials.error("regex", "0"))
    await settle()
    for task in tasks:
        task.cancel()
    again = asyncio.create_task(trials.error("regex", str(PROCESSES)))
    await settle()
    assert not again.done()
    asked.go_on.set()
    assert await stays is None
    assert await again is None
    assert asked.texts == ["0", "1", "2"]


async def test_whoever_waits_when_the_engine_stops_is_told_so(trials: GrammarTrials) -> None:
    scripted(trials)
    tasks = [asyncio.create_task(trials.error("regex", str(i))) for i in range(PROCESSES + 1)]
    await settle()
    await trials.stop()
    for task in tasks:
        with pytest.raises(EngineDead):
            await task
    with pytest.raises(EngineDead):
        await trials.error("regex", "late")


async def test_a_constraint_that_takes_too_long_is_remembered_as_one(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges: list[Any] = []

    class Process:
        returncode = None

        def kill(self) -> None: ...

        async def wait(self) -> None: ...

    async def exchange(process: Any, message: Any) -> Any:
        exchanges.append(message)
        await asyncio.sleep(10)

    monkeypatch.setattr(grammar_trials, "_ANSWER_SECONDS", 0.02)
    monkeypatch.setattr(grammar_trials, "_exchange", exchange)
    for process in trials._processes:
        process._process = Process()  # type: ignore[assignment]
    assert await trials.error("regex", "slow") == TOO_MUCH
    assert await trials.error("regex", "slow") == TOO_MUCH
    assert len(exchanges) == 1
