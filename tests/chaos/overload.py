"""Overload: ten times as many clients as the server has places. A refused client comes again after `Retry-After`.

    python -m tests.chaos.overload --minutes 7

The server has as many waiting places as places in its batch. On a machine with two or more processors, the load client
and the server use different ones.

The number of tokens in an answer varies between a half and one and a half times the mean. With equal numbers, the
requests at capacity would run in step, and the engine would process 16 prompts at once, which happens under no other
load. `--alike` measures that case.

For each contract, the program prints:

- the completed requests per second at capacity and under overload, and their times
- the processor time of the server and of its engine
- the times of `/ping` and `/metrics`
- the processor time that the server needs for a refusal
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import msgspec
import psutil

from benchmarks.load import Figures, LoadSpec, command, percentile
from tests.chaos.__main__ import subject
from tests.chaos.client import ask, request_bytes
from tests.chaos.contracts import CONTRACTS, Answer, Contract
from tests.chaos.watch import Subject, clock

_BATCH = _QUEUE = 16
_PLACES = _BATCH + _QUEUE
_FACTOR = 10
_ROUNDS = 2
_TOKENS = 32
_VARIED = range(_TOKENS // 2, _TOKENS + _TOKENS // 2 + 1)
_PROCESSES = ("slipway", "VLLM::EngineCore", "VLLM::Worker")
_MEASURED = ("lmi", "lmi jsonlines stream", "tgi", "triton", "happy_vllm", "openai chat", "openai completions")
_REFUSALS = 300
"""The number of refusals over which the processor time is measured."""
_LONG = 900
"""The tokens of the requests that occupy the places during this measurement."""


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one contract under overload. Times are in milliseconds."""

    contract: str
    peak_per_s: float
    """Completed requests per second, with as many clients as places."""
    overload_per_s: float
    ratio: float
    peak_p99: float
    overload_p50: float
    overload_p99: float
    """The time of admitted requests."""
    refused: int
    refused_p50: float
    refused_p99: float
    ping_p99: float
    ping_longest: float
    metrics_p99: float
    metrics_longest: float
    errors: dict[str, int]
    refusal_cpu: float
    """The CPU time of the server's process for one refusal on a new connection."""
    peak_cpu: dict[str, float]
    """CPU seconds per second, by process."""
    overload_cpu: dict[str, float]


def processors() -> tuple[list[int], list[int]]:
    """Return the processors for the server and those for the clients."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores, cores) if len(cores) < 2 else (cores[:-1], cores[-1:])


def load(
    tested: Subject, contract: Contract, clients: int, seconds: float, cores: Sequence[int], tokens: Sequence[int]
) -> tuple[Figures, dict[str, float]]:
    """Generate the load with the benchmarks' load client. Return its figures and the server's CPU seconds."""
    spec = LoadSpec(
        url=tested.server.url + contract.path,
        body="\n".join(json.dumps(contract.body(count)) for count in tokens),
        concurrency=clients,
        seconds=seconds,
        tokens=_TOKENS,
        come_again=True,
    )
    program = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command(spec)]
    began, before = clock(), _cpu_seconds(tested)
    done = subprocess.run(program, stdout=subprocess.PIPE, check=True)
    spent, took = _cpu_seconds(tested), clock() - began
    cpu = {name: round((spent[name] - before[name]) / took, 3) for name in spent}
    return msgspec.json.decode(done.stdout, type=Figures), cpu


def _cpu_seconds(tested: Subject) -> dict[str, float]:
    return {name: sum(tested.process(name).cpu_times()[:2]) for name in _PROCESSES}


async def metrics_times(port: int, stop: asyncio.Event) -> list[float]:
    """Return how many seconds each of many calls to `/metrics` took."""
    times = []
    while not stop.is_set():
        began = clock()
        await ask(port, request_bytes("/metrics", b"", "GET"), 30.0)
        times.append(clock() - began)
        await asyncio.sleep(0.1)
    return times


async def measure(
    tested: Subject, contract: Contract, seconds: float, cores: Sequence[int], tokens: Sequence[int]
) -> Result:
    """Measure one contract at capacity and beyond, in turn, because the speed of a shared machine varies."""
    # `/metrics` also takes processor time, so it is called under both loads.
    stop = asyncio.Event()
    watching = asyncio.create_task(metrics_times(tested.server.port, stop))
    began = clock()
    peaks, overloads = [], []
    for _ in range(_ROUNDS):
        for clients, taken in ((_PLACES, peaks), (_FACTOR * _PLACES, overloads)):
            part = seconds / _ROUNDS
            taken.append(await asyncio.to_thread(load, tested, contract, clients, part, cores, tokens))
    stop.set()
    metrics = [1000 * time for time in await watching]
    pings = [1000 * (ping.received - ping.sent) for ping in tested.watch.pings if ping.sent >= began]
    (peak, peak_cpu), (beyond, overload_cpu) = _together(peaks), _together(overloads)
    return Result(
        contract=contract.name,
        peak_per_s=round(peak.requests / peak.wall_s, 1),
        overload_per_s=round(beyond.requests / beyond.wall_s, 1),
        ratio=round((beyond.requests / beyond.wall_s) / (peak.requests / peak.wall_s), 3),
        peak_p99=round(peak.total_p99_ms),
        overload_p50=round(beyond.total_p50_ms),
        overload_p99=round(beyond.total_p99_ms),
        refused=beyond.refused,
        refused_p50=round(beyond.refused_p50_ms, 1),
        refused_p99=round(beyond.refused_p99_ms, 1),
        ping_p99=round(percentile(pings, 0.99), 1),
        ping_longest=round(max(pings), 1),
        metrics_p99=round(percentile(metrics, 0.99), 1),
        metrics_longest=round(max(metrics), 1),
        errors=peak.error_kinds | beyond.error_kinds,
        refusal_cpu=round(await refusal_cpu(tested, contract), 3),
        peak_cpu=peak_cpu,
        overload_cpu=overload_cpu,
    )


def _together(rounds: Sequence[tuple[Figures, dict[str, float]]]) -> tuple[Figures, dict[str, float]]:
    """Return the sums of counts and seconds, the medians of times, and the processor time per second."""
    figures = [one for one, _ in rounds]
    times = [name for name in Figures.__struct_fields__ if name.endswith("_ms")]
    whole = msgspec.structs.replace(
        figures[0],
        requests=sum(one.requests for one in figures),
        refused=sum(one.refused for one in figures),
        wall_s=sum(one.wall_s for one in figures),
        error_kinds=dict(pair for one in figures for pair in one.error_kinds.items()),
        **{name: statistics.median(getattr(one, name) for one in figures) for name in times},
    )
    return whole, {name: round(statistics.mean(cpu[name] for _, cpu in rounds), 3) for name in _PROCESSES}


async def refusal_cpu(tested: Subject, contract: Contract) -> float:
    """Return how many milliseconds of CPU time the server needs for a refusal. The time for the requests that occupy
    the places is not included.

    The engine is paused during the measurement, so that these requests cost nothing.
    """
    port, server = tested.server.port, psutil.Process(tested.server.process.pid)
    held = next(contract for contract in CONTRACTS if contract.name == "lmi")
    long = request_bytes(held.path, json.dumps(held.body(_LONG)).encode())
    refused = request_bytes(contract.path, json.dumps(contract.body(_TOKENS)).encode())
    tested.truth.is_now(200, 500)
    engine = tested.process("VLLM::EngineCore")
    engine.suspend()
    try:
        holders = [asyncio.create_task(ask(port, long, 600, "plain", Random(0))) for _ in range(_PLACES)]
        await asyncio.to_thread(tested.server.wait_for_metric, "slipway_open_requests", _PLACES)
        before = sum(server.cpu_times()[:2])
        for _ in range(_REFUSALS):
            assert _is_full(await ask(port, refused, 30))
        spent = sum(server.cpu_times()[:2]) - before
    finally:
        engine.resume()
    for holder in holders:
        holder.cancel()
    await asyncio.gather(*holders, return_exceptions=True)
    await asyncio.to_thread(tested.server.wait_for_metric, "slipway_open_requests", 0.0)
    tested.truth.is_now(200)
    return 1000 * spent / _REFUSALS


def _is_full(answer: object) -> bool:
    return isinstance(answer, Answer) and (b"queue is full" in answer.body or b"overloaded" in answer.body)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=7.0, help="for all contracts together")
    parser.add_argument("--contracts", default=",".join(_MEASURED))
    parser.add_argument("--alike", action="store_true", help="all answers have as many tokens")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    measured = [contract for contract in CONTRACTS if contract.name in given.contracts.split(",")]
    tokens = [_TOKENS] if given.alike else _VARIED
    seconds = 60 * given.minutes / (2 * len(measured))
    servers, clients = processors()
    os.sched_setaffinity(0, servers)
    results = []
    with tempfile.TemporaryDirectory(prefix="chaos-logs-") as directory:
        tested = subject(Path(directory), stall_timeout=60.0, queue=_QUEUE)
        os.sched_setaffinity(0, clients)
        try:
            tested.wait_until_ready()
            for contract in measured:
                results.append(asyncio.run(measure(tested, contract, seconds, clients, tokens)))
                print(json.dumps(asdict(results[-1])), flush=True)
            tested.end()
        finally:
            tested.close()
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    lies = tested.watch.lies
    print("\n".join(lies))
    return 1 if lies or any(result.errors for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
