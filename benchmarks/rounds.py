"""Runs the peers against each other: same model, same load, one at a time, in alternating rounds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.figures import Figures
from benchmarks.peers import PEERS, Engine, Peer, Pressure, Shape, Slipway

LEAD_IN_TOKENS = 8
IDLE_SHARE_ALLOWED = 0.05

T = TypeVar("T")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, and what is asked of it."""

    name: str
    engine: Engine
    shapes: tuple[Shape, ...]
    concurrency: tuple[int, ...]
    rounds: int
    seconds: float
    timeout: float
    contracts: tuple[str, ...] = ("lmi",)
    """In which of its contracts Slipway is asked."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One load run of one variant."""

    workload: str
    stream: bool
    concurrency: int
    round: int
    variant: str
    figures: Figures
    front_end_cpu_s: float
    engine_cpu_s: float
    idle_cpu_s: float
    """What the other peers, which had nothing to do, used meanwhile."""

    @property
    def rate(self) -> float:
        """Tokens per second; requests per second where each answer is one token."""
        return self.figures.tokens / self.figures.wall_s

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.front_end_cpu_s / self.figures.tokens if self.figures.tokens else float("nan")


def run(workload: Workload, peer_names: Sequence[str], log_dir: Path | None, report: Report) -> list[Sample]:
    """Start the peers, measure them, and stop them whatever happens."""
    with ExitStack() as stack:
        work_dir = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-benchmarks-")))
        peers = [Slipway(workload.contracts) if name == Slipway.name else PEERS[name]() for name in peer_names]
        for peer in peers:
            report(f"{workload.name}: starting {peer.name}")
            directory = work_dir / f"{workload.name}-{peer.name}"
            directory.mkdir(parents=True)
            stack.enter_context(peer.start(workload.engine, directory))
        for peer in peers:
            peer.wait_ready()
            peer.server.pause()
        samples: list[Sample] = []
        for shape in workload.shapes:
            samples += _measure_shape(workload, peers, shape, report)
        return samples


def _measure_shape(workload: Workload, peers: Sequence[Peer], shape: Shape, report: Report) -> list[Sample]:
    entrants = [(peer, variant) for peer in peers for variant in peer.variants(shape)]
    samples: list[Sample] = []
    for concurrency in workload.concurrency:
        pressure = Pressure(concurrency=concurrency, seconds=workload.seconds, timeout=workload.timeout)
        for number in range(workload.rounds):
            for peer, variant in in_turn(entrants, number):
                sample = _measure(workload, peers, peer, variant, shape, pressure, number)
                samples.append(sample)
                report(_progress(sample))
    return samples


def _measure(
    workload: Workload,
    peers: Sequence[Peer],
    peer: Peer,
    variant: str,
    shape: Shape,
    pressure: Pressure,
    number: int,
) -> Sample:
    # Once each, unmeasured: the first requests of a kind, or after a pause, take longer.
    lead_in = replace(shape, tokens=min(shape.tokens, LEAD_IN_TOKENS))
    with _awake(peer):
        peer.load(variant, lead_in, replace(pressure, seconds=0.0))
        before = {each.name: each.cpu_time() for each in peers}
        figures = peer.load(variant, shape, pressure)
        used = {each.name: each.cpu_time() - before[each.name] for each in peers}
    own = used.pop(peer.name)
    return Sample(
        workload=workload.name,
        stream=shape.stream,
        concurrency=pressure.concurrency,
        round=number,
        variant=variant,
        figures=figures,
        front_end_cpu_s=own.front_end,
        engine_cpu_s=own.engine,
        idle_cpu_s=sum(idle.front_end + idle.engine for idle in used.values()),
    )


@contextmanager
def _awake(peer: Peer) -> Iterator[None]:
    peer.server.go_on()
    try:
        yield
    finally:
        peer.server.pause()


def in_turn(entrants: Sequence[T], number: int) -> list[T]:
    """A different one first in each round, and every other round backwards, so that none always follows the same."""
    start = number % len(entrants)
    turned = [*entrants[start:], *entrants[:start]]
    return turned[::-1] if number % 2 else turned


def _progress(sample: Sample) -> str:
    figures = sample.figures
    kind = "streaming" if sample.stream else "one token"
    line = (
        f"{sample.workload}, {kind}, {sample.concurrency} clients, round {sample.round + 1}: {sample.variant} "
        f"{sample.rate:.0f}/s, {sample.cpu_us_per_token:.0f} µs/token, {figures.wall_s:.1f} s"
    )
    if figures.errors:
        line += f", {figures.errors} ERRORS {figures.error_kinds}"
    if sample.idle_cpu_s > IDLE_SHARE_ALLOWED * figures.wall_s:
        line += f", but the idle servers used {sample.idle_cpu_s:.2f} s of CPU time"
    return line
