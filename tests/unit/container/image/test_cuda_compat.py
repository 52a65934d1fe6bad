from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "container" / "image" / "cuda-compat.sh"
LINE = "NVRM version: NVIDIA UNIX {kind}x86_64 Kernel Module  {version}  Tue Dec 24 02:36:00 UTC 2024\n"
OPEN_LINE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (dvs-builder@U16)  Tue Dec 24\n"
)


def library_path(directory: Path, driver: str | None, libraries: str | None, before: str = "") -> str:
    """Return the LD_LIBRARY_PATH of a command that the script runs."""
    compat, file = directory / "compat", directory / "version"
    compat.mkdir()
    if libraries is not None:
        for name in (f"libcuda.so.{libraries}", "libcuda.so.1", "libcuda.so", f"libnvidia-nvvm.so.{libraries}"):
            (compat / name).touch()
    if driver is not None:
        file.write_text(driver)
    environment = {**os.environ, "CUDA_COMPAT": str(compat), "NVIDIA_DRIVER_FILE": str(file), "LD_LIBRARY_PATH": before}
    command = ["sh", str(SCRIPT), "printenv", "LD_LIBRARY_PATH"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


@pytest.mark.parametrize("line", [LINE.format(kind="", version="570.86.15"), OPEN_LINE.format(version="535.216.01")])
def test_an_older_driver_gets_the_libraries(tmp_path: Path, line: str) -> None:
    assert library_path(tmp_path, line, "580.82.07") == str(tmp_path / "compat")


def test_what_was_in_the_path_stays_behind_them(tmp_path: Path) -> None:
    line = OPEN_LINE.format(version="570.86.15")
    assert library_path(tmp_path, line, "580.82.07", "/opt/lib") == f"{tmp_path / 'compat'}:/opt/lib"


@pytest.mark.parametrize("before", ["/a:/b", "/a:/b:", ":/a:/b", "/a::/b", ":::/a:/b::"])
@pytest.mark.parametrize("driver", [None, OPEN_LINE.format(version="570.86.15")])
def test_the_loader_never_looks_in_the_working_directory(tmp_path: Path, before: str, driver: str | None) -> None:
    path = library_path(tmp_path, driver, "580.82.07", before)
    assert path == ("/a:/b" if driver is None else f"{tmp_path / 'compat'}:/a:/b")


@pytest.mark.parametrize("before", ["", ":", "::"])
def test_a_path_of_nothing_is_no_path(tmp_path: Path, before: str) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": before}
    command = ["sh", str(SCRIPT), "sh", "-c", "echo ${LD_LIBRARY_PATH+set}"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("version", ["580.65.06", "580.82.07", "590.10", "1000.1"])
def test_a_driver_of_the_same_branch_or_a_newer_one_is_left_alone(tmp_path: Path, version: str) -> None:
    assert library_path(tmp_path, OPEN_LINE.format(version=version), "580.82.07") == ""


@pytest.mark.parametrize(("driver", "libraries"), [(None, "580.82.07"), (OPEN_LINE.format(version="570.1"), None)])
def test_without_a_driver_or_libraries_nothing_changes(
    tmp_path: Path, driver: str | None, libraries: str | None
) -> None:
    assert library_path(tmp_path, driver, libraries) == ""


def test_the_command_takes_the_scripts_place_and_keeps_its_arguments() -> None:
    command = ["sh", str(SCRIPT), "sh", "-c", 'echo "$$"; echo "$1"; exit 7', "name", "two words"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == [str(process.pid), "two words"]
    assert process.returncode == 7
