"""Soak: the memory, descriptors and threads of the server's processes under a steady load of all contracts.

    python -m tests.chaos.soak --minutes 20 --out soak.json
    python -m tests.chaos.soak --minutes 30 --changes 20

With `--changes N`, the engine is killed N times under the load. A model and an adapter are also loaded and unloaded N
times.

The program writes soak.json: the memory, descriptors and threads of each process, the names of shared memory, and the
times of `/ping` and of requests. The exit code is 1 if a request was lost, if `/ping` did not tell the truth, or if a
figure grew from the second quarter of the time to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import psutil

from benchmarks.load import percentile
from tests.chaos.__main__ import subject, tiny_adapter
from tests.chaos.actions import KINDS, Stage, rest
from tests.chaos.load import Load
from tests.chaos.watch import Subject, clock

_RESTARTS = r"^slipway_engine_restarts_total(?:\{[^}]*\})? (\S+)$"
_GROWTH = 0.05
"""The share by which a figure's median may grow from the second quarter of the time to the last quarter."""
_SLACK = {"rss_mb": 16.0, "descriptors": 16.0, "threads": 2.0}
"""The absolute growth that is always allowed."""
_NAMES_SLACK = 2
"""The allowed growth of the number of shared-memory names."""
_CALLS = 5
"""The number of calls to each model or adapter that a change loads."""
_LEAVING = 20
"""The number of clients that leave at once, and the number of samples between two such moments."""


@dataclass(frozen=True, slots=True)
class Process:
    """The resources that one process uses at one moment."""

    rss_mb: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a soak."""

    second: float
    processes: dict[str, Process]
    names: int
    """The number of shared-memory names that the server's processes created."""
    restarts: int
    """The number of restarts of the engine so far."""
    ping: float | None
    """The longest time of `/ping` since the last sample, in seconds."""
    p50: float | None
    p99: float | None
    """Times of the requests that were completed since the last sample, in seconds."""
    requests: int
    """The number of complete answers so far."""


async def soak(
    tested: Subject, seed: int, clients: int, seconds: float, every: float, changes: int = 0
) -> tuple[list[Sample], Load]:
    """Generate the load, and take samples."""
    load = Load(tested, clients, seed)
    stage = Stage(tested, load, Random(seed), tiny_adapter() if changes else None, grace=5.0)
    samples: list[Sample] = []
    begun = last = clock()
    turn = changed = 0
    while clock() < begun + seconds:
        await asyncio.sleep(every)
        now = clock()
        samples.append(await _sample(tested, load, last, now - begun))
        last = now
        if (turn := turn + 1) % _LEAVING == 0:
            await KINDS["leave"].do(stage, _LEAVING)
        if changed < changes and now >= begun + seconds * (changed + 1) / (changes + 1):
            changed += 1
            for name in ("model", "adapter", "kill_engine"):
                await KINDS[name].do(stage, _CALLS)
    await rest(stage, 0.0)
    await load.stop()
    load.violations += stage.violations
    return samples, load


async def _sample(tested: Subject, load: Load, since: float, second: float) -> Sample:
    times = [end - begin for begin, end in load.completed if end >= since]
    pings = [ping.received - ping.sent for ping in list(tested.watch.pings) if ping.received >= since]
    _, metrics = await load.ask("/metrics", method="GET")
    return Sample(
        second=round(second, 1),
        processes=await asyncio.to_thread(_processes, tested),
        names=len(tested.shared_names()),
        restarts=int(sum(map(float, re.findall(_RESTARTS, metrics.decode(), re.M)))),
        ping=max(pings, default=None),
        p50=percentile(times, 0.5) if times else None,
        p99=percentile(times, 0.99) if times else None,
        requests=len(load.completed),
    )


def _processes(tested: Subject) -> dict[str, Process]:
    found = {}
    for process in tested.processes():
        with contextlib.suppress(psutil.Error):
            name = _name(process)
            rss = round(process.memory_info().rss / (1 << 20), 1)
            found[name] = Process(rss, process.num_fds(), process.num_threads())
    return found


def _name(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    if "slipway serve" in command:
        return "server"
    if command.startswith("VLLM::"):
        return command.split()[0]
    return "resource tracker" if "resource_tracker" in command else process.name()


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return the figures whose median grew from the second quarter of the time to the last."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[3 * quarter :]
    if not quarter:
        return []
    found = []
    names, names_late = (percentile([float(sample.names) for sample in part], 0.5) for part in (early, late))
    if names_late > names + _NAMES_SLACK:
        found.append(f"names of shared memory grew from {names:g} to {names_late:g}")
    for process in late[-1].processes:
        for figure, slack in _SLACK.items():
            before, after = (
                percentile([getattr(s.processes[process], figure) for s in part if process in s.processes], 0.5)
                for part in (early, late)
            )
            if after > before + max(slack, _GROWTH * before):
                found.append(f"{figure} of {process} grew from {before:g} to {after:g}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument(
        "--changes", type=int, default=0, help="number of engine deaths, and of loads of another model and an adapter"
    )
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"), help="JSON file for the results")
    given = parser.parse_args()
    with subject(stall_timeout=60.0, engine_restarts=given.changes) as tested:
        tested.wait_until_ready()
        seconds = 60 * given.minutes
        samples, load = asyncio.run(soak(tested, given.seed, given.clients, seconds, given.every, given.changes))
        code = tested.end()
    violations = load.violations + tested.watch.lies + tested.left_behind + grown(samples)
    violations += [f"exit code {code}"] if code else []
    outcomes: Counter[str] = Counter()
    for (_, outcome), count in load.outcomes.items():
        outcomes[outcome] += count
    report = {"violations": violations, "outcomes": outcomes, "samples": [asdict(sample) for sample in samples]}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report))
    print(json.dumps({"violations": violations, "outcomes": outcomes, "last": asdict(samples[-1])}, indent=1))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
