"""Chaos: random faults and clients against the real server, and the promises that it must keep even then.

    python -m tests.chaos --minutes 2 --seed 7
    python -m tests.chaos --answers 20000 --pause 5 --seed 7
    python -m tests.chaos --seed 7 --actions "fill:120 stop_engine:6.5 rest:0"

The promises:

- Every request gets exactly one complete answer or one well-formed error of its contract.
- A request gets an error only if the server was disturbed.
- `/ping` tells the truth at every moment.
- Nothing runs while no client waits.
- The server leaves nothing behind on the machine.

If a promise is broken, the exit code is 1. The report lists the actions, and `--actions` repeats them. Leave out the
actions that the failure does not need.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from benchmarks.tiny_model import prepare_tiny_llama
from container.sources.sample_model import make_once
from engines.cache_dir import cache_dir
from tests.chaos.actions import KINDS, Action, Recovery, Stage, random_action, rest
from tests.chaos.load import Load
from tests.chaos.watch import Subject, clock

STALL_TIMEOUT = 4.0
_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
_LOST = ("lost", "hung", "malformed")


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a run."""

    seed: int
    seconds: float
    actions: list[str]
    violations: list[str]
    requests: int
    answers: int
    """Complete answers. The number of requests alone says little, because a dead server refuses quickly."""
    refusals: int
    """Requests that a full queue refused. Their clients retried after the time in `Retry-After`."""
    lost: int
    """Requests that got neither a complete answer nor an expected error."""
    by_outcome: dict[str, int]
    pings: int
    recoveries: list[Recovery]
    tracebacks: int
    """The number of tracebacks in the server's log. A killed engine may leave some."""


@contextlib.contextmanager
def subject(
    stall_timeout: float = STALL_TIMEOUT, max_model_len: int = 1024, queue: int = 64, engine_restarts: int = 0
) -> Iterator[Subject]:
    """Start a server of the tiny model with few places in its queue. At the end, kill what still runs."""
    model = prepare_tiny_llama()
    options = {
        "model_id": model,
        "rolling_batch": "vllm",
        "dtype": "fp32",
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": 32 << 20,
        "max_rolling_batch_size": 16,
        "enable_lora": "true",
        "chat_template": "template.jinja",
    }
    environment = {
        "SERVING_STALL_TIMEOUT": str(stall_timeout),
        "SERVING_JOB_QUEUE_SIZE": str(queue),
        # One thread: if other programs use the processors, several threads would wait for each other.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    environment |= {"SERVING_ENGINE_RESTART": str(engine_restarts), "SERVING_CONTINUE": "0"}
    with tempfile.TemporaryDirectory(prefix="chaos-logs-") as directory:
        (Path(directory) / "model").mkdir()
        (Path(directory) / "model" / "template.jinja").write_text(_TEMPLATE)
        tested = Subject(Path(directory), environment, **options)
        try:
            yield tested
        finally:
            tested.close()


def tiny_adapter() -> Path:
    """Return a LoRA adapter for the tiny model. It is created only once."""
    from tests.live.lora import make_adapter

    model = prepare_tiny_llama()
    return make_once(cache_dir() / f"{model.name}-adapter", lambda path: make_adapter(path, model, seed=1) and None)


async def perform(stage: Stage, actions: Iterable[Action], seconds: float, pause: float, answers: float) -> list[str]:
    """Perform the actions until the time is up, enough answers are complete, or a promise is broken.

    Args:
        stage: The server and its load.
        actions: The actions to perform.
        seconds: The maximum duration of the run.
        pause: The longest pause between two actions, in seconds.
        answers: The number of complete answers after which the run ends.

    Returns:
        The actions that were performed.
    """
    load, deadline = stage.load, clock() + seconds
    done: list[str] = []
    try:
        for action in actions:
            done.append(str(action))
            await KINDS[action.name].do(stage, action.amount)
            wrong = stage.violations or load.violations or stage.subject.watch.lies or stage.subject.left_behind
            if wrong or clock() > deadline or len(load.completed) >= answers:
                break
            await asyncio.sleep(stage.random.uniform(0.0, pause))
        await rest(stage, 0.0)
    except Exception as error:
        stage.violations.append(f"{done[-1]}: {type(error).__name__}: {error}")
    await load.stop()
    if answers < math.inf and len(load.completed) < answers:
        stage.violations.append(f"only {len(load.completed)} whole answers of {answers:g}")
    return done


def endless(seed: int) -> Iterable[Action]:
    random = Random(seed)
    while True:
        yield random_action(random)


async def chaos(
    actions: Iterable[Action],
    seconds: float,
    clients: int,
    seed: int = 1,
    adapter: Path | None = None,
    stall_timeout: float = STALL_TIMEOUT,
    engine_restarts: int = 0,
    pause: float = 1.0,
    answers: float = math.inf,
) -> Report:
    """Perform one run against a new server."""
    with subject(stall_timeout, engine_restarts=engine_restarts) as tested:
        await asyncio.to_thread(tested.wait_until_ready)
        load = Load(tested, clients, seed)
        stage = Stage(tested, load, Random(f"{seed}/stage"), adapter, grace=max(5.0, stall_timeout))
        started = clock()
        done = await perform(stage, actions, seconds, pause, answers)
        if (code := await asyncio.to_thread(tested.end, stage.grace)) != 0:
            stage.violations.append(f"exit code {code} at the end")
        return report_of(stage, seed, done, clock() - started)


def report_of(stage: Stage, seed: int, actions: list[str], seconds: float) -> Report:
    load, tested = stage.load, stage.subject
    by_outcome: Counter[str] = Counter()
    for (contract, outcome), count in sorted(load.outcomes.items()):
        by_outcome[outcome if contract != "management" else contract] += count
    return Report(
        seed=seed,
        seconds=round(seconds, 1),
        actions=actions,
        violations=stage.violations + load.violations + tested.watch.lies + tested.left_behind,
        requests=load.outcomes.total(),
        answers=len(load.completed),
        refusals=by_outcome["refused"],
        lost=sum(by_outcome[outcome] for outcome in _LOST),
        by_outcome=dict(by_outcome),
        pings=len(tested.watch.pings),
        recoveries=stage.recoveries,
        tracebacks=tested.log_text().count("Traceback (most recent"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="time limit; default: 1, or no limit with --answers")
    parser.add_argument("--answers", type=float, default=math.inf, help="stop after this number of whole answers")
    parser.add_argument("--pause", type=float, default=1.0, help="maximum seconds between two actions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=STALL_TIMEOUT,
        help="SERVING_STALL_TIMEOUT of the server; use more on a busy machine",
    )
    parser.add_argument("--engine-restarts", type=int, default=0, help="SERVING_ENGINE_RESTART of each server")
    parser.add_argument("--actions", help="actions such as 'fill:100 kill_engine:0', in place of random actions")
    given = parser.parse_args()
    actions = [Action.read(text) for text in given.actions.split()] if given.actions else endless(given.seed)
    minutes = given.minutes or (1.0 if given.answers == math.inf else math.inf)
    run = chaos(
        actions,
        60 * minutes,
        given.clients,
        given.seed,
        tiny_adapter(),
        given.stall_timeout,
        given.engine_restarts,
        given.pause,
        given.answers,
    )
    report = asyncio.run(run)
    print(json.dumps(asdict(report), indent=1))
    print(
        f"{report.answers} whole answers, {report.refusals} refused by a full queue, {report.lost} lost",
        file=sys.stderr,
    )
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
