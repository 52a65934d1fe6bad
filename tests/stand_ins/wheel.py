"""A Python package as a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(folder: Path, answer: str, version: str = "1.0") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"tiny_package-{version}-py3-none-any.whl"
    info = f"tiny_package-{version}.dist-info"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("tiny_package.py", f"ANSWER = {answer!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-package\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return name
