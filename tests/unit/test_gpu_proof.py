"""`make gpu-proof`: the proof first reports all that a machine lacks, and an interrupted run leaves its results."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.gpu import needs

ROOT = Path(__file__).parents[2]
DRIVER = "580.65.06\n"


@pytest.fixture
def whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a machine that has all that is needed."""
    monkeypatch.setattr(needs, "_output", _output)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("tests.gpu.needs.platform.machine", lambda: "x86_64")
    monkeypatch.setattr("tests.gpu.needs.Path.exists", lambda self: True)
    monkeypatch.setattr("tests.gpu.needs.importlib.util.find_spec", lambda name: name)


def _output(*command: str) -> str:
    if command[0] == "nvidia-smi":
        return DRIVER
    Path(command[command.index("-d") + 1], "msgspec.whl").touch()
    return ""


def test_a_machine_that_has_everything_lacks_nothing(whole_machine: None) -> None:
    assert needs.missing_gpu() == []
    assert needs.missing_for_install() == []


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ("", "There is no NVIDIA GPU: `nvidia-smi` is missing, or lists none."),
        ("570.124.06\n", "NVIDIA's driver is 570.124.06: CUDA 13.0 needs branch 580 or later."),
    ],
)
def test_the_gpu_and_its_driver_are_looked_at(
    whole_machine: None, monkeypatch: pytest.MonkeyPatch, versions: str, sentence: str
) -> None:
    monkeypatch.setattr(needs, "_output", lambda *command: versions)
    assert needs.missing_gpu() == [sentence]


def test_a_compiler_and_headers_are_looked_for(whole_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("tests.gpu.needs.Path.exists", lambda self: False)
    compiler, headers = needs.missing_gpu()
    assert "c++" in compiler
    assert f"{sysconfig.get_path('include')}/Python.h" in headers


@pytest.mark.parametrize("module", ["venv", "ensurepip", "pip"])
def test_pythons_own_modules_are_looked_for(whole_machine: None, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr("tests.gpu.needs.importlib.util.find_spec", lambda name: None if name == module else name)
    (sentence,) = needs.missing_for_install()
    assert module in sentence


def test_make_the_processor_the_python_and_the_index_are_looked_at(
    whole_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("tests.gpu.needs.platform.machine", lambda: "aarch64")
    monkeypatch.setattr("tests.gpu.needs.sys.version_info", (3, 10, 2, "final", 0))
    monkeypatch.setattr(needs, "_output", lambda *command: "")
    python, processor, make, index = needs.missing_for_install()
    assert "3.11, 3.12 or 3.13" in python
    assert "aarch64" in processor
    assert "`make`" in make
    assert "PIP_FIND_LINKS" in index


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
