"""Trials of constraints: how calls wait for a trial, the limits, and what follows a failure.

The trial's process is scripted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from engines.errors import EngineDead, Overloaded
from engines.vllm.constraints import trials as module
from engines.vllm.constraints.trial_process import TOO_MUCH, Trial
from engines.vllm.constraints.trials import GrammarTrials
from tests.waiting import SECONDS, until


class Process:
    """A stand-in for the trial's process. It keeps the texts that it gets, and answers after `go_on` is set."""

    stdin = stdout = None

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()
        self.ended = False
        self.code = -signal.SIGKILL

    def exchange(self, process: Process, message: dict[str, str], kind: type) -> Any:
        assert process is self
        self.texts.append(message["text"] if kind is Trial else message["answer"])
        assert self.go_on.wait(SECONDS)
        if self.ended:
            raise ValueError
        return Trial() if kind is Trial else "valid"

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        self.ended = True
        self.go_on.set()

    def wait(self) -> int:
        return self.code


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(module, "_exchange", process.exchange)
    return process


def real_trials() -> GrammarTrials:
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
    running = asyncio.create_task(trials.trial("regex", "slow"))
    await until(lambda: process.texts)
    with monkeypatch.context() as short:
        short.setattr(module, "WAIT_SECONDS", 0.05)
        with pytest.raises(Overloaded, match=r"has waited 0\.05 s"):
            await trials.trial("regex", "late")
    process.go_on.set()
    assert not (await running).error
    assert not (await trials.trial("regex", "late")).error
    assert process.texts == ["slow", "late"]


async def test_what_nobody_waits_for_any_more_is_not_tried_and_the_same_constraint_is_tried_once(
    process: Process, trials: GrammarTrials
) -> None:
    running, gone, same, again = [asyncio.create_task(trials.trial("regex", text)) for text in "abcc"]
    await until(lambda: process.texts)
    gone.cancel()
    await asyncio.wait({gone})
    process.go_on.set()
    assert await asyncio.gather(running, same, again) == [Trial()] * 3
    assert process.texts == ["a", "c"]


async def test_whoever_waits_when_the_engine_stops_is_told_so(process: Process, trials: GrammarTrials) -> None:
    tasks = [asyncio.create_task(trials.trial("regex", str(i))) for i in range(3)]
    await until(lambda: process.texts)
    await trials.stop()
    for task in tasks:
        with pytest.raises(EngineDead):
            await task
    with pytest.raises(EngineDead):
        await trials.trial("regex", "late")


@pytest.mark.parametrize("code", [-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV])
async def test_a_constraint_that_ends_the_process_is_remembered_as_one(
    process: Process, trials: GrammarTrials, code: int
) -> None:
    process.code = code
    process.kill()
    assert (await trials.trial("regex", "slow")).error == TOO_MUCH
    assert (await trials.trial("regex", "slow")).error == TOO_MUCH
    assert process.texts == ["slow"]


@pytest.mark.parametrize(("code", "tries"), [(1, 2), (-signal.SIGKILL, 1)])
async def test_a_constraint_whose_process_ended_by_itself_or_was_killed_may_be_tried_again(
    process: Process, trials: GrammarTrials, code: int, tries: int
) -> None:
    process.code = code
    process.kill()
    with pytest.raises(Overloaded, match="try again later"):
        await trials.trial("regex", "good")
    assert process.texts == ["good"] * tries
    process.ended = False
    assert (await trials.trial("regex", "good")) == Trial()


async def test_a_constraint_that_an_ended_process_has_not_read_is_tried_by_the_next_one() -> None:
    trials = real_trials()
    try:
        assert not (await trials.trial("regex", "a")).error
        ended: Any = trials._process
        ended.send_signal(signal.SIGABRT)
        ended.wait()
        polled = iter([None])  # The process has ended since this poll.
        ended.poll = lambda: next(polled, ended.returncode)
        assert not (await trials.trial("regex", "b")).error
    finally:
        await trials.stop()


async def test_a_check_that_cannot_end_costs_no_constraint_its_trial() -> None:
    trials = real_trials()
    verdicts: list[str] = []
    schema: Any = {"$ref": "#/$defs/L"}
    try:
        for number in range(12):  # The levels decide which part of the validator fails.
            endless = {"$defs": {"L": {"not": {"$ref": "#/$defs/L"}}}, "not": schema}
            trials.check(json.dumps(endless), '{"a":1}', verdicts.append)
            assert (await trials.trial("regex", "a" * (number + 1))).error != TOO_MUCH
            schema = {"allOf": [schema]}
        await until(lambda: len(verdicts) == 12)
        assert set(verdicts) == {"unchecked"}
    finally:
        await trials.stop()


async def test_what_is_remembered_is_bounded_with_errors_and_places(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def exchange(_: object, message: dict[str, str], __: type) -> Trial:
        tried.append(message["text"])
        return Trial("e" * 20, "t" * 20, ("#/a" * 5, "#/b" * 5))

    monkeypatch.setattr(module, "_REMEMBERED_CHARACTERS", 100)
    monkeypatch.setattr(module, "_exchange", exchange)
    for text in "aabba":
        await trials.trial("regex", text)
    assert tried == ["a", "b", "a"]


async def test_a_trial_waits_for_one_check_at_most(process: Process, trials: GrammarTrials) -> None:
    verdicts: list[str] = []
    for answer in ("1", "2", "3"):
        trials.check("{}", answer, verdicts.append)
    await until(lambda: process.texts)
    trial = asyncio.create_task(trials.trial("regex", "a"))
    process.go_on.set()
    await trial
    await until(lambda: len(verdicts) == 3)
    assert process.texts == ["1", "a", "2", "3"]
    assert verdicts == ["valid"] * 3


async def test_answers_that_are_too_many_or_too_long_are_not_checked(process: Process, trials: GrammarTrials) -> None:
    verdicts: list[str] = []
    trials.check("{}", "1" * (module._ANSWER_CHARACTERS + 1), verdicts.append)
    assert verdicts == ["unchecked"]
    for _ in range(module._WAITING_ANSWERS + 2):
        trials.check("{}", "1", verdicts.append)
    assert verdicts == ["unchecked"] * 3
    process.go_on.set()
    await until(lambda: len(verdicts) == module._WAITING_ANSWERS + 3)
    assert verdicts[3:] == ["valid"] * module._WAITING_ANSWERS


async def test_answers_are_not_checked_by_a_process_that_has_ended_or_stops(
    process: Process, trials: GrammarTrials
) -> None:
    verdicts: list[str] = []
    process.kill()
    trials.check("{}", "1", verdicts.append)
    await until(lambda: verdicts)
    process.ended = False
    process.go_on.clear()
    for answer in ("2", "3"):
        trials.check("{}", answer, verdicts.append)
    await until(lambda: process.texts == ["1", "2"])
    await trials.stop()
    await until(lambda: len(verdicts) == 2)
    trials.check("{}", "4", verdicts.append)
    assert verdicts == ["unchecked"] * 3


async def test_a_stopped_process_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = real_trials()
    try:
        assert not (await trials.trial("regex", "a")).error
        stopped = trials._process
        assert stopped is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        monkeypatch.setattr(module, "CLOCK_SECONDS", 0.2)
        # The message is longer than a pipe's buffer, so the writer has to wait as well.
        choices = json.dumps(["a" * 100_000])
        with pytest.raises(Overloaded, match="try again later"):
            await trials.trial("choice", choices)
        assert stopped.poll() == -signal.SIGKILL
        monkeypatch.undo()
        assert not (await trials.trial("regex", "[a]")).error
        assert trials._process is not stopped
    finally:
        await trials.stop()
