"""Builds the image on a base image that contains vLLM: creates Slipway's environment and compiles the base's modules.

In the base image, vLLM and its dependencies belong to the first Python on PATH: the system's Python (vLLM's image) or a
virtual environment (AWS's image). Slipway's environment can import the base image's packages, but its own packages come
first. The base image's packages are not changed. Run this file with the base image's Python:

    base_image.py environment DIRECTORY LOCK PYPROJECT    creates the environment and prints pip's constraints
    base_image.py lacking REPORT LOCK                     prints the lock's lines for the packages in pip's report
    base_image.py compile                                 compiles all modules to bytecode
"""

from __future__ import annotations

import compileall
import json
import re
import sys
import tomllib
import venv
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PTH = "base_image.pth"


def package_directories() -> list[str]:
    """Return the directories of this Python's packages: site-packages, and dist-packages on Debian and Ubuntu."""
    return [path for path in sys.path if path.endswith("-packages")]


def installed() -> dict[str, str]:
    """Return the version of each package by its canonical name.

    If a package is installed twice, the version that Python imports counts.
    """
    versions: dict[str, str] = {}
    for package in metadata.distributions():
        if package.name:
            versions.setdefault(canonicalize_name(package.name), package.version)
    return versions


def constraints(present: Mapping[str, str], lock: str, dependencies: list[str]) -> list[str]:
    """Return the lock file's pins, without hashes, of the packages that pip may have to add.

    The base image lacks these packages, or has a version that Slipway does not support.
    """
    unfit = {
        canonicalize_name(requirement.name)
        for requirement in map(Requirement, dependencies)
        if not requirement.specifier.contains(present.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    }
    pins = {name: lines.partition(" \\\n")[0] for name, lines in _requirements(lock).items()}
    return [pin for name, pin in pins.items() if name not in present or name in unfit]


def lacking(report: Mapping[str, Any], lock: str) -> list[str]:
    """Return the lock file's lines, with hashes, for the packages that pip would add to Slipway.

    Args:
        report: The report that pip's option `--report` writes.
        lock: The text of the lock file.

    Raises:
        SystemExit: pip would add a version that is not in the lock file.
    """
    requirements = _requirements(lock)
    wanted = []
    for item in report["install"]:
        name, version = canonicalize_name(item["metadata"]["name"]), item["metadata"]["version"]
        if "dir_info" in item["download_info"]:
            continue  # Slipway itself.
        lines = requirements.get(name, "")
        if not re.match(rf"[^=]+=={re.escape(version)}(\s|$)", lines):
            sys.exit(f"pip would add {name} {version}, which is not in the lock file")
        wanted.append(lines)
    return wanted


def check_vllm(present: Mapping[str, str], extras: Mapping[str, list[str]]) -> None:
    """Check that the base image has the vLLM release that Slipway supports.

    Args:
        present: The base image's packages.
        extras: pyproject.toml's optional dependencies. `gpu` and `cpu` contain the release of vLLM.

    Raises:
        SystemExit: The base image has another release of vLLM, or no vLLM.
    """
    wanted = [Requirement(text) for extra in ("gpu", "cpu") for text in extras[extra] if text.startswith("vllm")]
    found = [(requirement, present[requirement.name]) for requirement in wanted if requirement.name in present]
    if not found:
        sys.exit(f"the base image has no vLLM; expected {wanted[0]}")
    for requirement, version in found:
        if version not in requirement.specifier:
            sys.exit(f"the base image has {requirement.name} {version}; expected {requirement}")


def make_environment(directory: Path) -> None:
    """Make an empty virtual environment that sees this Python's packages."""
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python3*/site-packages")
    # The option system_site_packages is not used: if this Python is in a virtual environment, that option would add the
    # system's packages instead of this Python's packages.
    lines = [f"import site; site.addsitedir({path!r})" for path in package_directories()]
    (site / _PTH).write_text("\n".join(lines) + "\n")


def _requirements(lock: str) -> dict[str, str]:
    """Return the lock file's lines of each package, with hashes, by the package's canonical name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(==.*(?:\n +--hash=.*)*)", lock, re.MULTILINE)
    return {canonicalize_name(name): name + rest for name, rest in found}


def main() -> None:
    """Run the command that the arguments name."""
    match sys.argv[1:]:
        case ["environment", directory, lock_file, project_file]:
            present, lock = installed(), Path(lock_file).read_text()
            project = tomllib.loads(Path(project_file).read_text())["project"]
            check_vllm(present, project["optional-dependencies"])
            make_environment(Path(directory))
            print("\n".join(constraints(present, lock, project["dependencies"])))
        case ["lacking", report_file, lock_file]:
            report = json.loads(Path(report_file).read_bytes())
            print("\n".join(lacking(report, Path(lock_file).read_text())))
        case ["compile"]:
            # As pip does during installation. Files that are not valid Python are skipped.
            for directory in package_directories():
                compileall.compile_dir(directory, quiet=2, workers=0)
        case other:
            sys.exit(f"unknown command: {other}; expected environment, lacking or compile")


if __name__ == "__main__":
    main()
