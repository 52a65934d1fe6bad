"""Concurrent requests in all contracts. Each must get exactly one answer, which must fit the server's state."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Coroutine
from random import Random

from tests.chaos.client import Broken, Hung, Left, Manner, ask, request_bytes
from tests.chaos.contracts import CONTRACTS, Answer, Contract, Malformed
from tests.chaos.watch import Moment, Subject, clock

REQUEST_SECONDS = 300.0
"""A request without a complete reply after this time counts as hung. Every fault is shorter."""
_MANNERS: tuple[Manner, ...] = ("plain", "plain", "plain", "plain", "leaves", "reads slowly", "sends slowly")
_TOKENS = 24
_PAUSE = 1.0
"""The number of seconds for which a client waits if it was refused without `Retry-After`, or if nothing listens."""
_LATER = (429, 503)
"""Statuses that require a `Retry-After`."""
_BUSY = (b"queue is full", b"overloaded")
"""Texts in refusals by a full queue. Every contract's refusal contains one of them."""


class Load:
    """Clients that repeat requests in random contracts, and additional requests."""

    def __init__(self, subject: Subject, clients: int, seed: int) -> None:
        self.violations: list[str] = []
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """The number of requests by contract and outcome.

        complete: The answer was complete.
        refused: The queue was full.
        failed: The reply was an error, and the server was about to start or stop, or had a dead engine.
        broken: Nothing listened, or the server was killed.
        left: The client left.
        lost, hung, malformed: These outcomes are always violations.
        """
        self.completed: list[tuple[float, float]] = []
        """For each complete answer: the times when its request was sent and when it ended. Sorted by the end."""
        self._subject = subject
        self._active = asyncio.Event()
        self._active.set()
        self._open = 0
        self._beside: set[asyncio.Task[object]] = set()
        self._clients = [asyncio.create_task(self._client(Random(f"{seed}/{n}"))) for n in range(clients)]

    async def stop(self) -> None:
        """Send no more requests, and wait for the open requests."""
        await self.rest()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def rest(self) -> None:
        """Send no new requests until `go_on` is called. Return when all open requests have ended."""
        self._active.clear()
        while self._beside:
            await asyncio.gather(*self._beside)
        while self._open:
            await asyncio.sleep(0.02)

    def go_on(self) -> None:
        self._active.set()

    def beside(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine in addition to the clients."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def first_completed(self, since: float) -> float | None:
        """Return the time of the first complete answer to a request that was sent after `since`."""
        later = self.completed[bisect_left(self.completed, since, key=lambda times: times[1]) :]
        return next((end for begin, end in later if begin >= since), None)

    async def send(self, contract: Contract, tokens: int, manner: Manner, random: Random) -> float:
        """Send one request and judge its reply. Return the seconds that the client has to wait afterwards."""
        sent = clock()
        request = request_bytes(contract.path, json.dumps(contract.body(tokens)).encode())
        self._open += 1
        wait = 0.0
        try:
            answer = await ask(self._subject.server.port, request, REQUEST_SECONDS, manner, random)
            outcome = self._outcome(contract, answer, tokens, sent)
            if isinstance(answer, Answer) and outcome in ("refused", "failed"):
                wait = answer.retry_after or _PAUSE  # The last record of a stream may be an error without a header.
        except Broken as error:
            outcome, wait = "broken", _PAUSE
            if 0 not in self.truth_since(sent).statuses:
                outcome = "lost"
                self.violations.append(f"{contract.name} ({manner}): the connection broke: {error}")
        except Hung as error:
            outcome = "hung"
            self.violations.append(f"{contract.name} ({manner}): {error}")
        except Malformed as error:
            outcome = "malformed"
            self.violations.append(f"{error} ({manner})")
        finally:
            self._open -= 1
        self.outcomes[contract.name, outcome] += 1
        if outcome == "complete":
            self.completed.append((sent, clock()))
        return wait

    async def ask(self, path: str, body: bytes = b"", method: str = "POST") -> tuple[int, bytes]:
        """Send a request outside the contracts, such as one to the management API.

        The status is 0 if the connection broke.
        """
        sent = clock()
        request = request_bytes(path, body, method, "application/json" if body else "text/plain")
        try:
            answer = await ask(self._subject.server.port, request, REQUEST_SECONDS)
        except Broken as error:
            if 0 not in self.truth_since(sent).statuses:
                self.violations.append(f"{method} {path}: the connection broke: {error}")
            self.outcomes["management", "broken"] += 1
            return 0, b""
        except Hung as error:
            self.violations.append(f"{method} {path}: {error}")
            return 0, b""
        assert isinstance(answer, Answer)
        self.outcomes["management", str(answer.status)] += 1
        return answer.status, answer.body

    def truth_since(self, sent: float) -> Moment:
        return self._subject.truth.between(sent, clock())

    async def _client(self, random: Random) -> None:
        while True:
            await self._active.wait()
            contract, manner = random.choice(CONTRACTS), random.choice(_MANNERS)
            wait = await self.send(contract, random.randint(1, _TOKENS), manner, random)
            if wait:
                await asyncio.sleep(wait)

    def _outcome(self, contract: Contract, answer: Answer | Left, tokens: int, sent: float) -> str:
        if isinstance(answer, Left):
            return "left"
        if contract.judge(answer, tokens) == "complete":
            return "complete"
        if answer.status in _LATER and answer.retry_after is None:
            raise Malformed(f"{contract.name}: {answer.status} without Retry-After: {answer.body!r}")
        if any(text in answer.body for text in _BUSY):
            return "refused"
        if not self.truth_since(sent).errors:
            raise Malformed(f"{contract.name}: an error though nothing was wrong: {answer.status} {answer.body!r}")
        return "failed"
