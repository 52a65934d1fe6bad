"""Who waits for a trial, for how long, and what becomes of the others; the process itself is scripted."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from handlers.errors import EngineDead, Overloaded
from tests.waiting import until

if TYPE_CHECKING:
    from handlers.engines.vllm.constraints import GrammarTrials

pytestmark = pytest.mark.asyncio


class Process:
    """Stands for the process: keeps what it is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()
        self.ended = False

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
        return -9


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    from handlers.engines.vllm import constraints

    process = Process()
    monkeypatch.setattr(constraints, "_exchange", process.exchange)
    return process


@pytest.fixture
def trials(process: Process) -> GrammarTrials:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from handlers.engines.vllm.constraints import GrammarTrials

    trials = GrammarTrials(Tokenizer(WordLevel({"a": 0}, unk_token="a")), 1, None)
    own: Any = process
    trials._process = own
    return trials


async def test_a_constraint_that_has_waited_too_long_is_refused(
    process: Process, trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    from handlers.engines.vllm import constraints

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


async def test_a_constraint_that_ends_the_process_is_remembered_as_one(process: Process, trials: GrammarTrials) -> None:
    from handlers.engines.vllm.constraints import TOO_MUCH

    process.kill()
    assert await trials.error("regex", "slow") == TOO_MUCH
    assert await trials.error("regex", "slow") == TOO_MUCH
    assert process.texts == ["slow"]
