"""Lists the packages of an image with their licences: Python packages and Debian packages.

    licenses.py    writes CSV to standard output: kind, name, version, licence

A package can include parts under other licences, such as a library in a wheel. The package contains the
texts of those licences.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

UNKNOWN = "unknown"
WITHOUT_FILES = "none, because it only names other packages"
_DOCUMENTATION = Path("/usr/share/doc")
_CLASSIFIER = "License :: "
_LICENSE_FILE = re.compile(r"(licen[cs]e|copying)", re.IGNORECASE)
_LONGEST = 100  # Some packages put the whole text of the licence into the field for its name.


class Package(NamedTuple):
    """A row of the CSV."""

    kind: str
    name: str
    version: str
    license: str


def python_packages() -> Iterator[Package]:
    """Yield this Python's packages. If two packages share a name, only the one that is imported is yielded."""
    seen = set()
    for package in metadata.distributions():
        name = package.name
        if name and name not in seen:
            seen.add(name)
            yield Package("python", name, package.version, license_of(package))


def license_of(package: metadata.Distribution) -> str:
    """Return the licence that a package declares, or `see` and the path of the licence's text.

    A package without files, such as `cuda-toolkit`, needs no licence.
    """
    fields = package.metadata.get_all
    for expression in fields("License-Expression") or ():
        return str(expression)
    for name in fields("License") or ():
        if name not in ("", "UNKNOWN") and "\n" not in name and len(name) <= _LONGEST:
            return str(name)
    classifiers = [text for text in fields("Classifier") or () if text.startswith(_CLASSIFIER)]
    if classifiers:
        return "; ".join(text.rpartition(" :: ")[2] for text in classifiers)
    files = package.files or []
    if texts := [str(file) for file in files if _LICENSE_FILE.match(file.name)]:
        return f"see {min(texts)}"
    return UNKNOWN if any(".dist-info" not in str(file) for file in files) else WITHOUT_FILES


def debian_packages() -> Iterator[Package]:
    """Yield the system's packages; none if dpkg is missing."""
    if shutil.which("dpkg-query") is None:
        return
    command = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${db:Status-Status}\n"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, version, status in (line.split("\t") for line in shown.splitlines()):
        if status == "installed":
            yield Package("debian", name, version, license_in(_DOCUMENTATION / name / "copyright"))


def license_in(file: Path) -> str:
    """Return the licences that a Debian copyright file names, or `see` and the file's path if it names none."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return UNKNOWN
    fields = re.findall(r"^License: *(\S.*?) *$", text, re.MULTILINE)
    common = re.findall(r"/usr/share/common-licenses/([\w.-]*\w)", text)
    return "; ".join(sorted({*fields} or {*common})) or f"see {file}"


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(Package._fields)
    writer.writerows(sorted([*debian_packages(), *python_packages()]))
