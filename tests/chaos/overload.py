"""Overload: ten times as many clients as the server has places. A refused client comes again after `Retry-After`.

    python -m tests.chaos.overload --minutes 7

The server has as many waiting places as places in its batch. On a machine with two or more processors, the load client
and the server use different processors.

The number of tokens in an answer varies between a half and one and a half times the mean. With equal numbers, all
requests at capacity would end together. The engine would then process 16 prompts at once, which happens under no other
load.

For each contract, the program prints the completed requests per second at capacity and under overload, their times, and
the times of refusals and of `/ping`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec

from benchmarks.load import Figures, LoadSpec, command, percentile
from tests.chaos.__main__ import subject
from tests.chaos.contracts import CONTRACTS, Contract
from tests.chaos.watch import Subject, clock

_BATCH = _QUEUE = 16
_PLACES = _BATCH + _QUEUE
_FACTOR = 10
_TOKENS = 32
_VARIED = range(_TOKENS // 2, _TOKENS + _TOKENS // 2 + 1)
_MEASURED = ("lmi", "lmi jsonlines stream", "tgi", "triton", "happy_vllm", "openai chat", "openai completions")


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
    errors: dict[str, int]


def processors() -> tuple[list[int], list[int]]:
    """Return the server's processors and the clients' processors."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores, cores) if len(cores) < 2 else (cores[:-1], cores[-1:])


def load(tested: Subject, contract: Contract, clients: int, seconds: float, cores: Sequence[int]) -> Figures:
    """Generate the load with the benchmarks' load client, and return its figures."""
    spec = LoadSpec(
        url=tested.server.url + contract.path,
        body="\n".join(json.dumps(contract.body(count)) for count in _VARIED),
        concurrency=clients,
        seconds=seconds,
        tokens=_TOKENS,
        come_again=True,
    )
    program = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command(spec)]
    done = subprocess.run(program, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Figures)


def measure(tested: Subject, contract: Contract, seconds: float, cores: Sequence[int]) -> Result:
    """Measure one contract at capacity and beyond."""
    began = clock()
    peak = load(tested, contract, _PLACES, seconds, cores)
    beyond = load(tested, contract, _FACTOR * _PLACES, seconds, cores)
    pings = [1000 * (ping.received - ping.sent) for ping in tested.watch.pings if ping.sent >= began]
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
        errors=peak.error_kinds | beyond.error_kinds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=7.0, help="total minutes of all contracts")
    parser.add_argument("--contracts", default=",".join(_MEASURED))
    given = parser.parse_args()
    measured = [contract for contract in CONTRACTS if contract.name in given.contracts.split(",")]
    seconds = 60 * given.minutes / (2 * len(measured))
    servers, clients = processors()
    os.sched_setaffinity(0, servers)
    results = []
    with subject(stall_timeout=60.0, queue=_QUEUE) as tested:
        os.sched_setaffinity(0, clients)
        tested.wait_until_ready()
        for contract in measured:
            results.append(measure(tested, contract, seconds, clients))
            print(json.dumps(asdict(results[-1])), flush=True)
        tested.end()
    lies = tested.watch.lies
    print("\n".join(lies))
    return 1 if lies or any(result.errors for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
