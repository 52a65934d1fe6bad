"""`make gpu-proof` rehearsed on a CPU: whole, with a minute for each half, and a few of its tests to their end.

A minute is seldom enough. The files that are left agree with the output, also on a slow machine that finished no test.
The few tests start each kind of server that the proof starts on a GPU, and have the time that they need.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks.rounds import Sample
from tests.without_make import without_make

ROOT = Path(__file__).parents[2]
SECONDS = 60
LIMIT_ENDED = 3
FEW = {
    "tests/gpu/test_copies_on_gpus.py": ["test_each_gpu_has_a_copy_and_its_share_of_the_calls"],
    "tests/gpu/test_dynamic_batch_on_gpu.py": ["test_calls_together_get_what_each_gets_alone"],
    "tests/gpu/test_vllm_on_gpu.py": ["test_it_starts_and_says_what_took_how_long", "test_beams_are_found"],
}
"""Tests of each file, which use the servers that it starts for all its tests."""


def proof(results: Path, *halves: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the proof on the CPU. `results`: its folder; `variables`: more of its environment."""
    own = {"GPU_PROOF_ON_CPU": "1", "GPU_PROOF_RESULTS": str(results), "PYTHON": sys.executable, **variables}
    return subprocess.run(
        ["sh", "tests/gpu/proof.sh", *halves],
        cwd=ROOT,
        env=without_make() | own,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )


def outcomes(results: Path) -> dict[str, set[str]]:
    """The tests in JUnit's file, each with the names of its elements: none, or the log's, if it has passed."""
    suite = ElementTree.parse(results / "tests.xml").getroot()
    found = {f"{case.get('classname')}::{case.get('name')}": {part.tag for part in case} for case in suite}
    assert suite.get("tests") == str(len(found))
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_proof_for_gpus_keeps_to_its_limits_and_leaves_what_it_has_found(tmp_path: Path) -> None:
    done = proof(tmp_path, GPU_PROOF_SECONDS=str(SECONDS))
    output = done.stdout[-4000:] + done.stderr[-4000:]
    ended = re.findall(rf"^The limit of {SECONDS} s ended the (\w+)\.", done.stderr, re.M)
    assert done.returncode == (LIMIT_ENDED if ended else 0), output

    found = outcomes(tmp_path)
    assert [name for name, parts in found.items() if parts & {"failure", "error"}] == []
    assert [name for name in found if name not in done.stdout] == []
    # pytest's summary has lines that begin with `SKIPPED [`.
    shown = len(re.findall(r"\b(?:PASSED|SKIPPED(?! \[))\b", done.stdout))
    # The limit may come after a test is written down and before it is shown.
    assert shown <= len(found) <= shown + ("tests" in ended)
    assert "tests" in ended or len(found) > 20

    measured = re.findall(r"^(tiny, .* round \d+): ", done.stderr, re.M)
    samples = tmp_path / "samples.json"
    kept = msgspec.json.decode(samples.read_bytes(), type=list[Sample]) if samples.exists() else []
    # The limit may come after a figure is shown and before it is written down.
    assert [sample.title for sample in kept] in (measured, measured[:-1] if "benchmark" in ended else measured)
    table = (tmp_path / "benchmarks.md").read_text()
    assert table in done.stdout
    assert ("| slipway |" in table) == bool(kept)
    assert kept or "benchmark" in ended


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_kind_of_server_that_the_proof_starts_serves_a_few_of_its_tests(tmp_path: Path) -> None:
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert FEW.keys() == files
    chosen = " or ".join(name for names in FEW.values() for name in names)
    done = proof(tmp_path, "tests", PYTEST_ADDOPTS=f"-k '{chosen}'")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = outcomes(tmp_path)
    assert found.keys() == {f"{file}::{name}" for file, names in FEW.items() for name in names}
    assert [name for name, parts in found.items() if parts - {"system-out"}] == []
