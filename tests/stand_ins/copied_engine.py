"""An engine with copies. A test kills the copies, and decides when a restart ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engines.errors import InvalidRequest
from engines.interface import CopyState, EngineCopy, EngineHealth, EngineStartError
from tests.stand_ins.scripted_engine import ScriptedEngine


class CopiedEngine(ScriptedEngine):
    """An engine with copies, each on two GPUs."""

    max_most = 4  # The number of copies that fit on the machine.
    stopped: str | None = None  # The reason for the stop. None if the engine was not stopped.

    def __init__(self, copies: int = 3, least: int | None = None, *, waits: bool = True) -> None:
        super().__init__()
        self.waits = waits
        self.started_at = 1e9
        self.states = dict.fromkeys(range(1, copies + 1), CopyState.READY)
        self.least = copies if least is None else least
        self.given_up: set[int] = set()
        self.stalled: set[int] = set()
        self.attempts: list[set[int]] = []  # The copies that each restart has started.
        self.broken: set[int] = set()  # Copies that cannot be started.
        self.restarting, self.may_start = asyncio.Event(), asyncio.Event()

    @property
    def copies(self) -> Sequence[EngineCopy]:
        return [
            EngineCopy(
                number, state, self.started_at, (2 * number - 2, 2 * number - 1), faulty=number in self._faulty()
            )
            for number, state in sorted(self.states.items())
        ]

    def _faulty(self) -> set[int]:
        return self._in(CopyState.DEAD) - self.given_up or self.stalled

    @property
    def max_sequences(self) -> int:
        return 2 * len(self.states)

    def die(self, *copies: int) -> None:
        self.states |= dict.fromkeys(copies, CopyState.DEAD)

    def _in(self, state: CopyState) -> set[int]:
        return {number for number, found in self.states.items() if found is state}

    def health(self) -> EngineHealth:
        ready, dead = len(self._in(CopyState.READY)), self._in(CopyState.DEAD) - self.given_up
        if not ready or self.stopped is not None:
            return EngineHealth(False, "the engine has died", ready_copies=0)
        missing = f"copies {sorted(dead)} have died" if dead else ""
        lost = f"{ready} of {self.least} copies serve" if self.given_up and ready < self.least else ""
        stalled = f"copy {sorted(self.stalled)}" if self.stalled else ""
        return EngineHealth(True, stalled=stalled, ready_copies=ready, missing=missing, lost=lost)

    async def restart(self) -> None:
        started = self._faulty()
        self.stalled = self.stalled - started
        self.die(*started)
        self.attempts.append(started)
        self.restarting.set()
        await self.may_start.wait()
        self.states |= dict.fromkeys(started - self.broken, CopyState.READY)
        if failed := started & self.broken:
            raise EngineStartError(f"copies {sorted(failed)} have no memory")

    def give_up(self) -> None:
        if self.health().alive:
            self.given_up |= self._in(CopyState.DEAD)
        else:
            self.waits = False

    def scale(self, least: int, most: int) -> None:
        if most > self.max_most:
            raise InvalidRequest(f"the machine has room for {self.max_most} copies")
        self.least = least
        self.states = {number: self.states.get(number, CopyState.STARTING) for number in range(1, most + 1)}

    async def stop(self, why: str = "") -> None:
        self.stopped = why
