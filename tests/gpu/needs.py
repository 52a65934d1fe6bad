"""Prints a sentence for each thing that a machine lacks for `make gpu-proof`. The exit code is 1 if it lacks anything.

    python3 tests/gpu/needs.py

This script runs on any Python and needs no package, so that it can be run before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

DRIVER = 580
"""The oldest branch of NVIDIA's driver that supports CUDA 13.0."""
_SECONDS = 60
_PROBE = "msgspec"
"""A small package from the lock file, to check that packages can be downloaded."""
_MODULES = ("msgspec", "psutil", "httpx", "pytest", "pytest_asyncio", "pytest_timeout", "xdist", "hypothesis")
"""The modules that the proof imports before its first part."""


def missing_gpu() -> list[str]:
    """Check the GPU, its driver's branch, and the compiler and headers that vLLM's kernels need."""
    found = []
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not versions.strip():
        found.append("There is no NVIDIA GPU: `nvidia-smi` is missing, or lists none.")
    elif (version := versions.split()[0]).split(".")[0].isdecimal() and int(version.split(".")[0]) < DRIVER:
        found.append(f"NVIDIA's driver is {version}: CUDA 13.0 needs branch {DRIVER} or later.")
    if shutil.which("c++") is None:
        found.append("There is no C++ compiler, c++: Triton and FlashInfer compile kernels (Debian: `g++`).")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        found.append(f"Python's headers are missing, {headers}: Triton compiles against them (Debian: `python3-dev`).")
    return found


def missing_for_install() -> list[str]:
    """Check the requirements of `make install-dev`."""
    found = []
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        found.append(f"Python is {platform.python_version()}: Slipway needs 3.11, 3.12 or 3.13 (make PYTHON=...).")
    if platform.machine() != "x86_64":
        found.append(f"The processor is {platform.machine()}: the locks are for x86_64.")
    if shutil.which("make") is None:
        found.append("There is no `make` (Debian: `make`).")
    for module, package in (("venv", "python3-venv"), ("ensurepip", "python3-venv")):
        if importlib.util.find_spec(module) is None:
            found.append(f"Python has no module `{module}` (Debian: `{package}`).")
    if importlib.util.find_spec("pip") is None:
        return [*found, "Python has no pip, so that it cannot be seen if packages can be had (Debian: `python3-pip`)."]
    with tempfile.TemporaryDirectory() as directory:
        download = ("-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=10", "-d", directory)
        _output(sys.executable, *download, _PROBE)
        if not os.listdir(directory):
            found.append(
                "pip reaches no index of packages: set PIP_INDEX_URL to one, or PIP_NO_INDEX=1 and PIP_FIND_LINKS to a "
                "folder that has the wheels of requirements/gpu.txt and requirements/dev.txt."
            )
    return found


def missing_modules() -> list[str]:
    """Check the modules of requirements/gpu.txt and requirements/dev.txt, if some of them are installed."""
    return [
        f"Python has no module `{module}`: install requirements/gpu.txt and requirements/dev.txt."
        for module in _MODULES
        if importlib.util.find_spec(module) is None
    ]


def _output(*command: str) -> str:
    """Return a program's output. Empty if the program is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def main() -> int:
    missing = [] if os.environ.get("GPU_PROOF_ON_CPU") == "1" else missing_gpu()
    missing += missing_modules() if importlib.util.find_spec("torch") else missing_for_install()
    for sentence in missing:
        print(sentence, file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
