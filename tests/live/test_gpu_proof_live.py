"""Runs all of `make gpu-proof` on a CPU, with small numbers: every part runs or reports that it needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.rounds import Sample
from tests.gpu.__main__ import PARTS
from tests.without_make import without_make

ROOT = Path(__file__).parents[2]
NEED_A_GPU = {"fp8", "offload"}
"""vLLM's CPU build cannot run them."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_proof_for_gpus_runs_whole_on_a_cpu(tmp_path: Path) -> None:
    # The proof ends itself and its servers in time, because the time limit of `subprocess.run` would kill only make.
    own = {"GPU_PROOF_ON_CPU": "1", "GPU_PROOF_RESULTS": str(tmp_path)}
    own |= {"GPU_PROOF_SECONDS": "3000", "GPU_PROOF_PART_SECONDS": "1500"}
    done = subprocess.run(
        ["make", "--old-file=install-dev", "gpu-proof", f"BIN={Path(sys.executable).parent}"],
        cwd=ROOT,
        env=without_make() | own,
        capture_output=True,
        text=True,
        timeout=3500,
        check=False,
    )
    output = done.stdout[-6000:] + done.stderr[-4000:]
    assert done.returncode == 0, output
    _, _, *rows = [line.strip("| ").split(" | ") for line in (tmp_path / "summary.md").read_text().splitlines()]
    assert [row[1] for row in rows] == [f"`make gpu-proof`: {part.name}" for part in PARTS]
    needs = {part.name: "needs a GPU" if part.name in NEED_A_GPU else "passed" for part in PARTS}
    assert [row[4] for row in rows] == list(needs.values()), output
    samples = msgspec.json.decode((tmp_path / "samples.json").read_bytes(), type=list[Sample])
    assert {sample.variant for sample in samples} >= {"slipway", "vllm"}
