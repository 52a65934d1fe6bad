"""The calls that wait for a trial, their limits, and the calls after a failure. The trial's process is scripted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from engines.errors import EngineDead, Overloaded
from tests.waiting import until

if TYPE_CHECKING:
    from engines.vllm.constraints import GrammarTrials

pytestmark = pytest.mark.asyncio


class Process:
    """A stand-in for the trial's process. It keeps the texts that it gets, and answers after `go_on` is set."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()
        self.ended = False
        self.code = -signal.SIGKILL

    def exchange(self, process: Process, message: dict[str, str]) -> str:
        assert process is self
        self.texts.append(message["text"])
        self.go_on.wait(10)
        if self.ended:
            raise ValueError
        return ""

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        self.ended = True
        self.go_on.set()

    def wait(self) -> int:
        return self.code


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    from engines.vllm import constraints

    process = Process()
    monkeypatch.setattr(constraints, "_exchange", process.exchange)
    return process


def real_trials() -> GrammarTrials:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    from engines.vllm.constraints import GrammarTrials

    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarTrials(tokenizer, 2, 1)


@pytest.fixture
def trials(process: Process) -> GrammarTrials:
    trials = real_trials()
    own: Any = process
    trials._process = own
    return trials


async def test_a_constraint_that_has_waited_too_long_is_refused(
    process: Process, trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.vllm import constraints

    running = asyncio.create_task(trials.error("regex", "slow"))
    await until(lambda: process.texts)
    monkeypatch.setattr(constraints, "WAIT_SECONDS", 0.05)
    with pytest.raises(Overloaded, match=r"has waited 0\.05 s"):
        await trials.error("regex", "late")
    process.go_on.set()
    assert await running == ""
    assert await trials.error("regex", "late") == ""
    assert process.texts == ["slow", "late"]


async def test_what_nobody_waits_for_any_more_is_not_tried_and_the_same_constraint_is_tried_once(
    process: Process, trials: GrammarTrials
) -> None:
    running, gone, same, again = [asyncio.create_task(trials.error("regex", text)) for text in "abcc"]
    await until(lambda: process.texts)
    gone.cancel()
    await asyncio.wait({gone})
    process.go_on.set()
    assert await asyncio.gather(running, same, again) == ["", "", ""]
    assert process.texts == ["a", "c"]


async def test_whoever_waits_when_the_engine_stops_is_told_so(process: Process, trials: GrammarTrials) -> None:
    tasks = [asyncio.create_task(trials.error("regex", str(i))) for i in range(3)]
    await until(lambda: process.texts)
    await trials.stop()
    for task in tasks:
        with pytest.raises(EngineDead):
            await task
    with pytest.raises(EngineDead):
        await trials.error("regex", "late")


@pytest.mark.parametrize("code", [-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, 1])
async def test_a_constraint_that_ends_the_process_is_remembered_as_one(
    process: Process, trials: GrammarTrials, code: int
) -> None:
    from engines.vllm.constraints import TOO_MUCH

    process.code = code
    process.kill()
    assert await trials.error("regex", "slow") == TOO_MUCH
    assert await trials.error("regex", "slow") == TOO_MUCH
    assert process.texts == ["slow"]


async def test_a_constraint_whose_process_was_killed_may_be_tried_again(
    process: Process, trials: GrammarTrials
) -> None:
    process.kill()
    with pytest.raises(Overloaded, match="try again later"):
        await trials.error("regex", "good")
    process.ended = False
    assert await trials.error("regex", "good") == ""
    assert process.texts == ["good", "good"]


async def test_a_stopped_process_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.vllm import constraints

    trials = real_trials()
    try:
        assert await trials.error("regex", "a") == ""
        stopped = trials._process
        assert stopped is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        monkeypatch.setattr(constraints, "CLOCK_SECONDS", 0.2)
        # The message is longer than a pipe's buffer, so the writer has to wait as well.
        choices = json.dumps(["a" * 100_000])
        with pytest.raises(Overloaded, match="try again later"):
            await trials.error("choice", choices)
        assert stopped.poll() == -signal.SIGKILL
        monkeypatch.undo()
        assert await trials.error("regex", "[a]") == ""
        assert trials._process is not stopped
    finally:
        await trials.stop()
