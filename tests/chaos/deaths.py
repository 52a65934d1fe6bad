"""Deaths: kills the engine, and compares the answers of the calls that ran with those of an engine that lived.

    python -m tests.chaos.deaths --calls 10000 --clients 128 --seed 7

Prints JSON. The exit code is 1 if an answer was wrong or an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.live.continued_calls import CASES, answer, kill
from tests.live.lora import make_adapter
from tests.live.server import Server, serving
from tests.live.small_model import prepare_small_model

_DEATHS_OF_A_SERVER = 4
"""The pause before a restart doubles with each death."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000, help="calls that have to run at a death, in all")
    parser.add_argument("--clients", type=int, default=64, help="calls at a time")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    random, outcomes = Random(given.seed), Counter[str]()
    began = time.monotonic()
    while outcomes["continued"] + outcomes["error"] < given.calls:
        with tempfile.TemporaryDirectory() as directory:
            attack(Path(directory), given.calls, given.clients, random, outcomes)
    print(json.dumps({**outcomes, "seed": given.seed, "seconds": round(time.monotonic() - began)}, indent=2))
    return int(bool(outcomes["wrong"] or outcomes["error"]))


def attack(directory: Path, calls: int, clients: int, random: Random, outcomes: Counter[str]) -> None:
    """Kill the engine of a new server some times."""
    model = prepare_small_model()
    make_adapter(directory / "model" / "adapters" / "red", model, 1)
    options = {"dtype": "fp32", "max_model_len": 2048, "kv_cache_memory_bytes": 512 << 20, "enable_lora": "true"}
    environment = {"SERVING_ENGINE_RESTART": "1000"}
    with serving(directory, environment, model_id=model, max_rolling_batch_size=256, **options) as server:
        right = {name: answer(server, case) for name, case in CASES.items()}
        for _ in range(_DEATHS_OF_A_SERVER):
            if outcomes["continued"] + outcomes["error"] < calls:
                kill_once(server, right, random.choices(list(CASES), k=clients), random, outcomes)
                print(dict(outcomes), file=sys.stderr, flush=True)


def kill_once(server: Server, right: dict[str, str], names: list[str], random: Random, outcomes: Counter[str]) -> None:
    """Kill the engine or its worker under calls, and compare their answers."""
    victim = server.engine_process() if random.random() < 0.5 else server.worker_process().pid
    before = server.metric("slipway_continued_calls_total")
    with ThreadPoolExecutor(len(names)) as pool:
        running = [pool.submit(answer, server, CASES[name]) for name in names]
        kill(server, len(names) * random.uniform(0.3, 0.9), victim)
        for name, call in zip(names, running, strict=True):
            outcome, got = "right", ""
            try:
                if (got := call.result()) != right[name]:
                    outcome = "wrong"
            except AssertionError as error:
                outcome, got = "error", str(error)
            outcomes[outcome] += 1
            if outcome != "right":
                print(f"{name}: {got}\ninstead of {right[name]}", file=sys.stderr)
    outcomes["continued"] += int(server.metric("slipway_continued_calls_total") - before)
    outcomes["deaths"] += 1


if __name__ == "__main__":
    sys.exit(main())
