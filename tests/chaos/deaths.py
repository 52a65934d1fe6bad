"""Deaths: kills the engine while calls run, and compares their answers with those of an engine that stays alive.

    python -m tests.chaos.deaths --answers 10000 --clients 512 --seed 7

The program prints JSON. The exit code is 1 if an answer was wrong or was an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.client import Broken, Hung, ask, request_bytes
from tests.chaos.contracts import Answer
from tests.live.continued_calls import OPTIONS, Case, add_adapters, cases, essence
from tests.live.server import START_SECONDS, Server, serving
from tests.live.small_model import prepare_small_model

_DEATHS_OF_A_SERVER = 5
"""The number of deaths before a new server is started. Each death doubles the pause before the next restart."""
_TEXTS = ("Once", "Twice", "A lamp", "The sea", "Rain", "Seven boats", "Morning", "Under the bridge")
_TOKENS = 12
_TOGETHER = 32
"""The number of concurrent calls to an engine that stays alive.

When an engine dies, far more calls are running, so the batches differ.
"""

_BATCH = 384
"""The number of sequences in a step. With more sequences, the engine's memory would exceed 3 GB. Other calls wait."""
_POLL_SECONDS = 0.02

Call = tuple[str, str]
"""The name of a case, and the text of its prompt."""


@dataclass(frozen=True)
class Asked:
    """A call to send."""

    call: Call
    case: Case

    async def answer(self, port: int) -> str:
        """Return the answer without the parts that differ between identical calls, or return the error."""
        request = request_bytes(self.case.path, json.dumps(self.case.body).encode())
        try:
            reply = await ask(port, request, START_SECONDS)
        except (Broken, Hung) as error:
            return f"error: {error}"
        assert isinstance(reply, Answer)
        text = reply.body.decode()
        return essence(text) if reply.status == 200 else f"error: {reply.status} {text}"


CALLS = {
    (name, text): Asked((name, text), case)
    for text in _TEXTS
    for name, case in cases(text, _TOKENS).items()
    if not case.session
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--answers", type=int, default=1000, help="total number of calls that must be running when an engine dies"
    )
    parser.add_argument("--clients", type=int, default=512, help="calls at the same time")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    attack = Attack(given.answers, min(given.clients, max(given.answers, 64)), Random(given.seed))
    began = time.monotonic()
    while not attack.done:
        with tempfile.TemporaryDirectory() as directory:
            attack.on_new_server(Path(directory))
    outcomes = attack.outcomes
    print(json.dumps({**outcomes, "seed": given.seed, "seconds": round(time.monotonic() - began)}, indent=2))
    return int(bool(outcomes["wrong"] or outcomes["error"]))


class Attack:
    """Kills engines until the given number of answers have survived the death of an engine."""

    def __init__(self, answers: int, clients: int, random: Random) -> None:
        self._answers, self._clients, self._random = answers, clients, random
        self._right: dict[Call, str] = {}  # The answers of an engine that stays alive: the same on every server.
        self.outcomes = Counter[str]()

    @property
    def done(self) -> bool:
        return self.outcomes["ran"] >= self._answers

    def on_new_server(self, directory: Path) -> None:
        """Kill the engine of a new server several times."""
        model = prepare_small_model()
        add_adapters(directory / "model", model)
        options = {"dtype": "fp32", "max_model_len": 2048, "kv_cache_memory_bytes": 512 << 20, **OPTIONS}
        options["max_rolling_batch_size"] = _BATCH
        environment = {"SERVING_ENGINE_RESTART": "1000", "SERVING_JOB_QUEUE_SIZE": str(2 * self._clients)}
        with serving(directory, environment, gives_way=False, model_id=model, **options) as server:
            if not self._right:
                self._right = asyncio.run(_ask_all(server.port, CALLS.values()))
            for _ in range(_DEATHS_OF_A_SERVER):
                if not self.done:
                    asyncio.run(self._kill_once(server))
                    print(dict(self.outcomes), file=sys.stderr, flush=True)

    async def _kill_once(self, server: Server) -> None:
        """Kill the engine or its worker while calls run, and check the answers of these calls."""
        random, outcomes = self._random, self.outcomes
        names = ("generated_tokens", "continued_calls", "engine_restarts")
        generated, continued, restarts = (server.metric(f"slipway_{name}_total") for name in names)
        asked = random.choices(list(CALLS.values()), k=self._clients)
        running = [asyncio.create_task(one.answer(server.port)) for one in asked]
        tokens = generated + self._clients * _TOKENS * random.uniform(0.1, 0.6)
        while not all(call.done() for call in running):
            if await asyncio.to_thread(server.metric, "slipway_generated_tokens_total") >= tokens:
                break
            await asyncio.sleep(_POLL_SECONDS)
        outcomes["ran"] += sum(not call.done() for call in running)
        if random.random() < 0.5:
            os.kill(server.worker_process().pid, signal.SIGKILL)
        else:  # On SIGTERM, vLLM's process aborts all calls.
            os.kill(server.engine_process(), random.choice((signal.SIGKILL, signal.SIGTERM)))
        for one, got in zip(asked, await asyncio.gather(*running), strict=True):
            right = self._right[one.call]
            outcome = "right" if got == right else "error" if got.startswith("error: ") else "wrong"
            outcomes[outcome] += 1
            if outcome != "right":
                print(f"{one.call}: {got}\ninstead of {right}", file=sys.stderr)
        outcomes["continued"] += int(server.metric("slipway_continued_calls_total") - continued)
        outcomes["deaths"] += int(server.metric("slipway_engine_restarts_total") - restarts)


async def _ask_all(port: int, calls: Iterable[Asked]) -> dict[Call, str]:
    """Return the answers to calls whose engine stays alive.

    Raises:
        AssertionError: An answer is an error.
    """
    places = asyncio.Semaphore(_TOGETHER)

    async def one(asked: Asked) -> tuple[Call, str]:
        async with places:
            got = await asked.answer(port)
        assert not got.startswith("error: "), (asked.call, got)
        return asked.call, got

    return dict(await asyncio.gather(*map(one, calls)))


if __name__ == "__main__":
    sys.exit(main())
