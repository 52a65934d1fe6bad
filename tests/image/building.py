"""Builds the CPU image from the Dockerfile that users build, also where no registry of images is reachable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.image.engine import Engine

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "container" / "image"
DEFAULT_BASE = "docker.io/library/debian:bookworm-slim"
LOCAL_BASE = "localhost/slipway-base:bookworm"
TAG = "localhost/slipway:image-test"
_BUILD_SECONDS = 3000


def build(engine: Engine) -> str:
    """Returns the image's tag. What has been built before is built again only where it has changed."""
    variables = engine.environment
    flags: list[str] = []
    if "BASE_IMAGE" not in os.environ and not _base_is_reachable(engine):
        variables["BASE_IMAGE"] = _local_base(engine)
    if engine.name == "podman" and variables.get("BASE_IMAGE") == LOCAL_BASE:
        # No registry: the packages come from wherever this machine's pip has them.
        flags = ["--volume", f"{_wheels()}:/wheels:ro"]
        variables |= {"PIP_FIND_LINKS": "/wheels", "PIP_NO_INDEX": "1"}
    _run(["sh", str(SCRIPTS / "build.sh"), "cpu", TAG, *flags], variables)
    return TAG


def _base_is_reachable(engine: Engine) -> bool:
    return engine.has_image(DEFAULT_BASE) or engine.run("pull", DEFAULT_BASE, check=False, seconds=300).returncode == 0


def _local_base(engine: Engine) -> str:
    if not engine.has_image(LOCAL_BASE):
        _run(["sh", str(SCRIPTS / "bootstrap-base.sh"), LOCAL_BASE], engine.environment)
    return LOCAL_BASE


def _wheels() -> Path:
    directory = ROOT / "build" / "wheels"
    lock = ROOT / "requirements" / "cpu.txt"
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), "-r", str(lock)])
    return directory


def _run(command: list[str], variables: dict[str, str] | None = None) -> None:
    finished = subprocess.run(
        command, env=variables, capture_output=True, text=True, errors="replace", timeout=_BUILD_SECONDS, check=False
    )
    assert finished.returncode == 0, f"{' '.join(command)}:\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
