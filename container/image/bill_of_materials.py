"""Writes the image's software bill of materials: what is installed, as CycloneDX 1.5.

Source of the format: the CycloneDX 1.5 specification; package URLs: purl-spec, types `pypi` and `deb`. It has no time
and no serial number, so that the same packages give the same bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

_DPKG_FORMAT = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"


def python_component(name: str, version: str, license_expression: str, summary: str) -> dict[str, Any]:
    """A Python package; `license_expression` is empty where its metadata has none."""
    canonical = re.sub(r"[-_.]+", "-", name).lower()
    purl = f"pkg:pypi/{canonical}@{quote(version, safe='')}"
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": canonical, "version": version}
    if summary:
        component["description"] = summary
    if license_expression:
        component["licenses"] = [{"expression": license_expression}]
    return component | {"purl": purl}


def debian_component(name: str, version: str, architecture: str) -> dict[str, Any]:
    """A Debian package."""
    purl = f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def document(components: Iterable[dict[str, Any]], version: str) -> dict[str, Any]:
    """The whole bill, of Slipway in this version."""
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


def _debian_components() -> Iterable[dict[str, Any]]:
    listing = subprocess.run(
        ["dpkg-query", "--show", "--showformat", _DPKG_FORMAT], capture_output=True, text=True, check=True
    )
    for line in listing.stdout.splitlines():
        status, name, version, architecture = line.split("\t")
        if status == "installed":
            yield debian_component(name, version, architecture)


def main() -> None:
    """Write the bill of what this interpreter and this system have to the file that is named."""
    components = [*_python_components(), *_debian_components()]
    bill = document(components, metadata.version("slipway"))
    Path(sys.argv[1]).write_text(json.dumps(bill, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
