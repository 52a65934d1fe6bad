"""The licences in the list of an image's packages."""

from __future__ import annotations

import subprocess
import sys
from csv import DictReader
from importlib import metadata
from pathlib import Path

import pytest

from container.image.licenses import UNKNOWN, WITHOUT_FILES, license_in, license_of

SCRIPT = Path(__file__).parents[4] / "container" / "image" / "licenses.py"


@pytest.mark.parametrize(
    ("fields", "license"),
    [
        ("License-Expression: MIT\nLicense: X", "MIT"),
        ("License: BSD 3-Clause", "BSD 3-Clause"),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License", "MIT License"),
        (f"License: {'long ' * 40}\nClassifier: License :: A\nClassifier: License :: B", "A; B"),
        ("Classifier: Topic :: Text", "see COPYING.txt"),
    ],
)
def test_a_python_packages_licence_is_the_one_that_it_declares(tmp_path: Path, fields: str, license: str) -> None:
    package = tmp_path / "thing-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.4\nName: thing\nVersion: 1\n{fields}\n")
    (package / "RECORD").write_text("COPYING.txt,,\nthing.py,,\n")
    for name in ("COPYING.txt", "thing.py"):  # Python 3.12 and later leave out files that do not exist.
        (tmp_path / name).touch()
    assert license_of(metadata.PathDistribution(package)) == license


def test_a_package_without_files_needs_no_licence(tmp_path: Path) -> None:
    package = tmp_path / "meta-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.4\nName: meta\nVersion: 1\nRequires-Dist: thing\n")
    (package / "RECORD").write_text("meta-1.dist-info/METADATA,,\nmeta-1.dist-info/RECORD,,\n")
    assert license_of(metadata.PathDistribution(package)) == WITHOUT_FILES
    (package / "RECORD").write_text("meta-1.dist-info/METADATA,,\nmeta.py,,\n")
    (tmp_path / "meta.py").touch()
    assert license_of(metadata.PathDistribution(package)) == UNKNOWN


@pytest.mark.parametrize(
    ("text", "license"),
    [
        ("Format: x\n\nFiles: *\nLicense: GPL-2+\n text\n\nFiles: a\nLicense: Expat\n", "Expat; GPL-2+"),
        ("See /usr/share/common-licenses/LGPL-2.1.\n", "LGPL-2.1"),
        ("All rights are with nobody.\n", "see {file}"),
        (None, "unknown"),
    ],
)
def test_a_debian_packages_licences_are_those_of_its_copyright_file(
    tmp_path: Path, text: str | None, license: str
) -> None:
    file = tmp_path / "copyright"
    if text is not None:
        file.write_text(text)
    assert license_in(file) == license.format(file=file)


def test_every_package_of_this_python_is_listed_once_with_a_licence() -> None:
    command = [sys.executable, "-I", str(SCRIPT)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {row["name"]: row["license"] for row in DictReader(lines) if row["kind"] == "python"}
    # A separate process is needed, because libraries of other tests have added directories to this process's path.
    names = "from importlib.metadata import distributions; print(*{package.name for package in distributions()})"
    installed = subprocess.run([sys.executable, "-I", "-c", names], capture_output=True, text=True, check=True).stdout
    assert found.keys() == set(installed.split())
    assert [name for name, license in found.items() if license in ("", "unknown")] == []
