"""The programs that people start by hand before a release. The tests run each program for a moment, and check its
output.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.without_make import without_make

ROOT = Path(__file__).parents[2]
SECONDS = 1500
pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS)]


def make(target: str, *variables: str, **environment: str) -> str:
    """Return the output of `make TARGET`, with the environment that runs the tests."""
    command = ["make", "--no-print-directory", "--old-file=install-dev", target, *variables]
    command += [f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=without_make() | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_chaos_loses_no_request() -> None:
    printed = make("chaos", "MINUTES=0.5")
    report = json.loads(printed[printed.index("{\n") :])
    assert report["answers"] > 0
    assert report["violations"] == []


@pytest.mark.parametrize("target", ["fuzz", "soak", "overload"])
def test_the_other_attacks_find_nothing(target: str) -> None:
    assert make(target, "MINUTES=0.5")


def test_calls_outlive_engines() -> None:
    printed = make("deaths", "ANSWERS=30")
    report = json.loads(printed[printed.index("{\n") :])
    assert report["right"] >= 30


def test_the_benchmark_compares_three_peers() -> None:
    table = make("bench", "ARGS=--workload b --quick")
    assert all(f"| {peer} |" in table for peer in ("slipway", "vllm", "bare"))


def test_the_benchmark_of_front_ends_compares_contracts_and_copies() -> None:
    table = make("bench-front-end", "ARGS=--peers slipway,vllm,floor --contracts lmi,triton --quick")
    peers = "slipway", "slipway:triton", "vllm", "floor", "slipway-2", "slipway-4", "in-turn"
    assert all(f"| {peer} |" in table for peer in peers)
