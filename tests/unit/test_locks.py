"""The lock files name the exact versions to install, and the hashes of their files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).parents[2] / "requirements"
_PINNED = re.compile(
    r"([a-z0-9][a-z0-9.-]*)(?:\[[a-z0-9,_-]+\])?==([0-9][A-Za-z0-9.!+]*)(?: ;.*)?(?: +--hash=sha256:[0-9a-f]{64})+"
)


def pins(name: str) -> dict[str, str]:
    """Return the versions of a lock, by package."""
    lines = (LOCKS / name).read_text().replace("\\\n", "").splitlines()
    found: dict[str, str] = {}
    for line in filter(None, (line.partition("#")[0].rstrip() for line in lines)):
        pinned = _PINNED.fullmatch(line)
        assert pinned is not None, f"{name}: {line!r} is not one version of a package, with hashes"
        assert pinned[1] not in found, f"{name}: {pinned[1]} is there twice"
        found[pinned[1]] = pinned[2]
    return found


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt", "dev.txt"])
def test_each_line_of_a_lock_is_one_version_of_one_package_with_hashes_and_no_address(name: str) -> None:
    assert pins(name)


def test_what_is_in_both_the_cpus_and_the_developers_lock_has_one_version() -> None:
    cpu, dev = pins("cpu.txt"), pins("dev.txt")
    assert {
        package: (cpu[package], dev[package]) for package in cpu.keys() & dev.keys() if cpu[package] != dev[package]
    } == {}
