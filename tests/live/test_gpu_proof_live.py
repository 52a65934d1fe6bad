"""`make gpu-proof` rehearsed on a CPU with a minute for each half, which is seldom enough."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.without_make import without_make

ROOT = Path(__file__).parents[2]
SECONDS = 60
LIMIT_ENDED = 3


@pytest.mark.timeout(600)
def test_the_proof_for_gpus_keeps_to_its_limits_and_leaves_what_it_has_found(tmp_path: Path) -> None:
    proof = {"GPU_PROOF_ON_CPU": "1", "GPU_PROOF_SECONDS": str(SECONDS), "GPU_PROOF_RESULTS": str(tmp_path)}
    done = subprocess.run(
        ["sh", "tests/gpu/proof.sh"],
        cwd=ROOT,
        env=without_make() | proof | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    ended = re.findall(rf"^The limit of {SECONDS} s ended the (\w+)\.", done.stderr, re.M)
    assert done.returncode == (LIMIT_ENDED if ended else 0), done.stdout[-4000:] + done.stderr[-4000:]

    cases = ElementTree.parse(tmp_path / "tests.xml").getroot().findall("testcase")
    # A test that passed may have logged something, which is an element as well.
    passed = [case for case in cases if {element.tag for element in case} <= {"system-out"}]
    assert len(passed) >= len(re.findall(r"\bPASSED\b", done.stdout))
    assert "tests" in ended or len(passed) > 20

    measured = re.findall(r"^tiny, .* round \d+: ", done.stderr, re.M)
    samples = tmp_path / "samples.json"
    assert len(json.loads(samples.read_bytes()) if samples.exists() else []) == len(measured)
    assert "benchmark" in ended or "| slipway |" in (tmp_path / "benchmarks.md").read_text()
