"""Writes the image's software bill of materials: the installed packages, as CycloneDX 1.5.

Sources: the CycloneDX 1.5 specification; purl-spec, types `pypi`, `deb` and `rpm`. The bill has no time and no serial
number, so that the same packages give the same bytes.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

_DPKG_FORMAT = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"
_RPM_FORMAT = "%{NAME}\t%{VERSION}-%{RELEASE}\t%{ARCH}\n"


def python_component(name: str, version: str, license_expression: str, summary: str) -> dict[str, Any]:
    """A Python package; `license_expression` and `summary` may be empty."""
    canonical = re.sub(r"[-_.]+", "-", name).lower()
    purl = f"pkg:pypi/{canonical}@{quote(version, safe='')}"
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": canonical, "version": version}
    if summary:
        component["description"] = summary
    if license_expression:
        component["licenses"] = [{"expression": license_expression}]
    return component | {"purl": purl}


def system_component(kind: str, distribution: str, name: str, version: str, architecture: str) -> dict[str, Any]:
    """A system package. `kind`: `deb` or `rpm`. `distribution`: such as `debian`, `ubuntu` or `amzn`."""
    purl = f"pkg:{kind}/{distribution}/{quote(name, safe='')}@{quote(version, safe='')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def debian_components(listing: str, distribution: str) -> Iterable[dict[str, Any]]:
    """The installed packages in dpkg-query's output: lines of status, name, version and architecture, with tabs."""
    for line in listing.splitlines():
        status, name, version, architecture = line.split("\t")
        if status == "installed":
            yield system_component("deb", distribution, name, version, architecture)


def document(components: Iterable[dict[str, Any]], version: str) -> dict[str, Any]:
    """The whole bill; `version` is Slipway's."""
    listed = {component["bom-ref"]: component for component in components}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": "slipway", "name": "slipway", "version": version}},
        "components": [listed[reference] for reference in sorted(listed)],
    }


def _python_components() -> Iterable[dict[str, Any]]:
    for package in metadata.distributions():
        yield python_component(
            package.name, package.version, _field(package, "License-Expression"), _field(package, "Summary")
        )


def _field(package: metadata.Distribution, name: str) -> str:
    values: list[str] | None = package.metadata.get_all(name)
    return values[0] if values else ""


def _system_components() -> Iterable[dict[str, Any]]:
    distribution = platform.freedesktop_os_release()["ID"]
    if shutil.which("dpkg-query"):
        yield from debian_components(_output("dpkg-query", "--show", "--showformat", _DPKG_FORMAT), distribution)
        return
    for line in _output("rpm", "--query", "--all", "--queryformat", _RPM_FORMAT).splitlines():
        name, version, architecture = line.split("\t")
        yield system_component("rpm", distribution, name, version, architecture)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write the bill of this interpreter's and this system's packages to the file that the first argument names.

    Further arguments are files with dpkg-query's output: packages whose files were copied into the image.
    """
    target, *copied = map(Path, sys.argv[1:])
    components = [*_python_components(), *_system_components()]
    for listing in copied:
        components += debian_components(listing.read_text(), "debian")
    bill = document(components, metadata.version("slipway"))
    target.write_text(json.dumps(bill, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
