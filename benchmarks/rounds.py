"""Measures the peers against each other, with the same model and load, one at a time, in alternating rounds."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.bare_engine import EngineLoad
from benchmarks.load import Figures
from benchmarks.peers import Engine, Peer

LEAD_IN_TOKENS = 8
IDLE_SHARE_ALLOWED = 0.05  # The CPU time that the other peers may use, as a share of the run's duration.

T = TypeVar("T")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, and the loads under which it is measured."""

    name: str
    engine: Engine
    loads: tuple[EngineLoad, ...]
    rounds: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One load run of one variant."""

    workload: str
    load: str  # The kind of load.
    stream: bool
    concurrency: int
    round: int
    variant: str
    figures: Figures
    front_end_cpu_s: float
    engine_cpu_s: float
    idle_cpu_s: float  # The CPU time that the other peers used during the run.

    @property
    def title(self) -> str:
        """The name of the run, for messages."""
        return f"{self.workload}, {self.load}, {self.concurrency} clients, {self.variant}, round {self.round + 1}"

    @property
    def rate(self) -> float:
        """Tokens per second. For one-token answers, this equals requests per second."""
        return self.figures.tokens / self.figures.wall_s

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.front_end_cpu_s / self.figures.tokens if self.figures.tokens else float("nan")

    @property
    def front_end_share(self) -> float:
        """The front end's CPU time relative to the run's duration."""
        return self.front_end_cpu_s / self.figures.wall_s

    @property
    def client_share(self) -> float:
        """The load client's CPU time relative to the run's duration."""
        return self.figures.client_cpu_s / self.figures.wall_s

    @property
    def others_disturbed(self) -> bool:
        """True if the other peers used more CPU time than allowed."""
        return self.idle_cpu_s > IDLE_SHARE_ALLOWED * self.figures.wall_s


def run(
    workload: Workload, peers: Sequence[Peer], log_dir: Path | None, report: Report, deadline: float = math.inf
) -> Generator[Sample, None, None]:
    """Start the peers and measure them. They are always stopped at the end.

    Peers that this machine cannot run are skipped.

    Args:
        workload: The model and the loads.
        peers: The servers to compare.
        log_dir: The directory for logs. None: logs are not kept.
        report: Called with a line for each step.
        deadline: A time of `time.monotonic`. See `in_time`.
    """
    reasons = {peer.name: peer.missing(workload.engine) for peer in peers}
    for name, reason in reasons.items():
        if reason:
            report(f"{workload.name}: {name} is left out: {reason}")
    peers = [peer for peer in peers if not reasons[peer.name]]
    with ExitStack() as stack:
        work_dir = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-benchmarks-")))
        for peer in peers:
            report(f"{workload.name}: starting {peer.name}")
            directory = work_dir / f"{workload.name}-{peer.name}"
            directory.mkdir(parents=True)
            stack.enter_context(peer.start(workload.engine, directory))
        for peer in peers:
            peer.wait_ready()
        for peer in peers:
            peer.server.wait_idle()
            peer.server.pause()
        for number, load in in_time(workload.loads, workload.rounds, deadline):
            entrants = [(peer, variant) for peer in peers for variant in peer.variants(load.stream)]
            for peer, variant in in_turn(entrants, number):
                sample = _measure(workload.name, peers, peer, variant, load, number)
                report(_progress(sample))
                yield sample


def in_time(
    loads: Sequence[T], rounds: int, deadline: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[int, T]]:
    """Yield each load once per round, with the number of the round.

    The rounds end when the remaining time is shorter than the longest load. The first load is always yielded.
    """
    longest = 0.0
    for number in range(rounds):
        for load in loads:
            begun = clock()
            if longest and begun + longest > deadline:
                return
            yield number, load
            longest = max(longest, clock() - begun)


def _measure(workload: str, peers: Sequence[Peer], peer: Peer, variant: str, load: EngineLoad, number: int) -> Sample:
    # Each client first sends one unmeasured request, because first requests are slower, even after a pause. In the
    # first round, this request has the load's full length, because GPU kernels are compiled when a batch has a new
    # size.
    tokens = min(load.tokens, LEAD_IN_TOKENS) if number else load.tokens
    lead_in = msgspec.structs.replace(load, tokens=tokens, seconds=0.0)
    peer.server.resume()
    try:
        peer.load(variant, lead_in)
        before = {each.name: each.server.cpu_time() for each in peers}
        figures = peer.load(variant, load)
        used = {each.name: each.server.cpu_time() - before[each.name] for each in peers}
    finally:
        peer.server.pause()
    own = used.pop(peer.name)
    return Sample(
        workload=workload,
        load=load.name,
        stream=load.stream,
        concurrency=load.concurrency,
        round=number,
        variant=variant,
        figures=figures,
        front_end_cpu_s=own.front_end,
        engine_cpu_s=own.engine,
        idle_cpu_s=sum(idle.front_end + idle.engine for idle in used.values()),
    )


def in_turn(entrants: Sequence[T], number: int) -> list[T]:
    """Return the order of a round. Every second round reverses the round before it; the next pair starts one later."""
    start = number // 2 % len(entrants)
    turned = [*entrants[start:], *entrants[:start]]
    return turned[::-1] if number % 2 else turned


def _progress(sample: Sample) -> str:
    figures = sample.figures
    line = f"{sample.title}: {sample.rate:.0f}/s, {sample.cpu_us_per_token:.0f} µs/token, {figures.wall_s:.1f} s"
    if figures.errors:
        line += f", {figures.errors} ERRORS {figures.error_kinds}"
    if sample.others_disturbed:
        line += f", but the idle servers used {sample.idle_cpu_s:.2f} s of CPU time"
    return line
