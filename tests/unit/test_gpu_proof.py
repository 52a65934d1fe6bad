"""`make gpu-proof`: the proof first reports all that a machine lacks, and an interrupted run leaves its results."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


def test_each_thing_that_is_missing_is_one_sentence_and_the_proof_does_not_begin(tmp_path: Path) -> None:
    """Uses a path that has Python and the shell's programs, and no nvidia-smi."""
    for name in ("dirname", "env", "mkdir", "rm"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable, "GPU_PROOF_RESULTS": str(tmp_path / "results")}
    command = ["/bin/sh", str(ROOT / "tests" / "gpu" / "proof.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("There is no NVIDIA GPU")
    assert all(line.endswith((".", ").")) for line in lines)
    assert not (tmp_path / "results").exists()


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

def test_passes(server):
    pass

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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "orderly"), [("TERM", True), ("KILL", False)])
def test_a_run_that_is_cut_short_leaves_the_tests_that_have_ended(tmp_path: Path, name: str, orderly: bool) -> None:
    (tmp_path / "test_it.py").write_text(TESTS % name)
    file = tmp_path / "tests.xml"
    environment = os.environ | {"GPU_PROOF_JUNIT": str(file), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.junit", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    suite = ElementTree.parse(file).getroot()
    found = {case.attrib["name"]: [child.tag for child in case] for case in suite}
    assert found == {
        "test_passes": [],
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


@pytest.mark.slow
def test_a_file_that_cannot_be_collected_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import no_such_module")
    file = tmp_path / "tests.xml"
    environment = os.environ | {"GPU_PROOF_JUNIT": str(file), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.junit", "-p", "no:cacheprovider", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert ElementTree.parse(file).getroot().get("errors") == "1"
