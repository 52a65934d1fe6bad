"""`make gpu-proof`: the proof first reports all that a machine lacks, and an interrupted run leaves its results."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.gpu.__main__ import LIMIT_ENDED, PARTS, Outcome, outcome_of, outcome_of_bench

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | environment
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False)


def test_each_thing_that_is_missing_is_one_sentence_and_the_proof_does_not_begin(tmp_path: Path) -> None:
    """The path has Python and the shell's programs, but not nvidia-smi."""
    for name in ("dirname", "env", "mkdir", "rm"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable, "GPU_PROOF_RESULTS": str(tmp_path / "results")}
    done = run("/bin/sh", str(ROOT / "tests" / "gpu" / "proof.sh"), **environment)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("There is no NVIDIA GPU")
    assert all(line.endswith((".", ").")) for line in lines)
    assert not (tmp_path / "results").exists()


def test_each_module_that_is_missing_beside_torch_is_one_sentence(tmp_path: Path) -> None:
    """`-S` hides the installed packages."""
    (tmp_path / "torch.py").touch()
    needs = str(ROOT / "tests" / "gpu" / "needs.py")
    done = run(sys.executable, "-S", needs, PYTHONPATH=str(tmp_path), GPU_PROOF_ON_CPU="1")
    assert done.returncode == 1
    named = re.findall(r"^Python has no module `(\w+)`: .*\.$", done.stderr, re.M)
    assert len(named) == len(done.stderr.splitlines())
    assert {"msgspec", "psutil", "pytest_timeout", "xdist"} < set(named)


TESTS = """
import os, pathlib, signal
import pytest

@pytest.fixture(scope="module")
def server():
    yield
    pathlib.Path("ended").touch()

@pytest.fixture
def broken():
    raise ValueError("no \\x00 server")

def test_passes(server, record_property):
    record_property("the gap:", "3 ms")

@pytest.mark.parametrize("number", [1, 2])
def test_fails(number):
    assert number == 2

def test_is_skipped():
    pytest.skip("not here")

def test_has_an_error(broken):
    pass

def test_ends_the_run(server):
    os.kill(os.getpid(), signal.SIG%s)
    signal.pause()

def test_comes_after():
    pass
"""


HANGS = """
import pathlib, threading, time
from concurrent.futures import ThreadPoolExecutor
import pytest

@pytest.fixture(scope="module")
def server():
    ended = threading.Event()
    yield ended
    ended.set()
    pathlib.Path("server ended").touch()

@pytest.mark.timeout(600)
def test_hangs(server):
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call, server).result()
    finally:
        time.sleep(3)  # As long as a server may take to stop: longer than the wait for a pool.
        pathlib.Path("block left").touch()

def call(server):
    if not server.wait(30):
        pathlib.Path("call ended").touch()
"""


def prove(directory: Path, tests: str, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """Run tests as the proof would run a part. The name of the part is `it`. The results are in the same directory."""
    file = directory / "tests" / "gpu" / "test_it.py"
    file.parent.mkdir(parents=True)
    file.write_text(tests)
    own = {"GPU_PROOF_RESULTS": str(directory), "GPU_PROOF_PART_SECONDS": str(seconds), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.junit", "-p", "no:cacheprovider"]
    return run(*command, "--rootdir", str(directory), "tests/gpu/test_it.py", cwd=directory, **own)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "orderly"), [("TERM", True), ("KILL", False)])
def test_a_run_that_is_cut_short_leaves_the_tests_that_have_ended(tmp_path: Path, name: str, orderly: bool) -> None:
    assert prove(tmp_path, TESTS % name).returncode != 0
    suite = ElementTree.parse(tmp_path / "it.xml").getroot()
    found = {case.attrib["name"]: [child.tag for child in case] for case in suite}
    assert found == {
        "test_passes": ["property"],
        "test_fails[1]": ["failure"],
        "test_fails[2]": [],
        "test_is_skipped": ["skipped"],
        "test_has_an_error": ["error"],
    }
    assert [suite.get(count) for count in ("failures", "errors", "skipped")] == ["1", "1", "1"]
    failure = suite.find(".//failure")
    assert failure is not None
    assert "assert 1 == 2" in str(failure.text)
    assert (tmp_path / "ended").exists() == orderly, "SIGTERM lets fixtures end what they started"
    outcome = outcome_of(tmp_path / "it.xml")
    assert outcome.result == "failed: test_fails[1], test_has_an_error"
    assert re.fullmatch("2 of 7 tests, [0-9]+ s; not here; the gap: 3 ms", outcome.note)


@pytest.mark.slow
def test_the_limit_of_a_part_ends_a_test_that_hangs_and_its_fixtures_end_their_servers(tmp_path: Path) -> None:
    prove(tmp_path, HANGS, seconds=0.1)
    assert {file.name for file in tmp_path.iterdir()} >= {"block left", "server ended"}
    assert not (tmp_path / "call ended").exists(), "the pool was not left before the call's own end"
    outcome = outcome_of(tmp_path / "it.xml")
    assert (outcome.result, outcome.note) == ("not run: the time was over", "0 of 1 tests, 0 s")


@pytest.mark.slow
def test_a_file_that_cannot_be_collected_is_an_error(tmp_path: Path) -> None:
    prove(tmp_path, "import no_such_module")
    assert outcome_of(tmp_path / "it.xml").result == "failed: tests/gpu/test_it.py"


def test_a_part_without_a_test_that_ran_has_not_passed(tmp_path: Path) -> None:
    case = '<testcase name="test_it"><skipped message="Skipped: needs a GPU"/></testcase>'
    (tmp_path / "it.xml").write_text(f'<testsuite tests="1" planned="1" skipped="1" time="0">{case}</testsuite>')
    assert outcome_of(tmp_path / "it.xml") == Outcome("needs a GPU", "0 of 1 tests, 0 s")


def test_a_benchmark_has_passed_if_it_ended_well_and_compares_streams(tmp_path: Path) -> None:
    report = tmp_path / "benchmarks.md"
    report.write_text("### tiny: streams (median of 1)\n")
    assert outcome_of_bench(report, 0, 9.0) == Outcome("failed: the benchmark has no ratios of streams", "9 s")
    report.write_text("### tiny: streams (median of 1)\n| slipway / vllm | 2 | 5.88 | 0.58 |\n")
    figures = "9 s; slipway / vllm, 2 clients: 5.88"
    assert outcome_of_bench(report, 0, 9.0) == Outcome("passed", figures)
    assert outcome_of_bench(report, 1, 9.0) == Outcome("failed: the benchmark ended with status 1", figures)


def test_parts_for_which_there_is_no_time_are_named(tmp_path: Path) -> None:
    own = {"GPU_PROOF_ON_CPU": "1", "GPU_PROOF_RESULTS": str(tmp_path), "GPU_PROOF_SECONDS": "0"}
    command = [sys.executable, "-m", "tests.gpu", "kill", "bench"]
    done = run(*command, **own)
    assert done.returncode == LIMIT_ENDED
    rows = [line.split(" | ")[1:5:3] for line in (tmp_path / "summary.md").read_text().splitlines()[2:]]
    assert rows == [[f"`make gpu-proof`: {name}", "not run: the time was over"] for name in ("kill", "bench")]
    wrong = run(*command, "tests", **own)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("unknown: tests; the parts are streams, adapters, ")


def test_each_file_of_the_folder_is_a_part() -> None:
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {file for part in PARTS if part.name not in ("bench", "internals") for file in part.files}
