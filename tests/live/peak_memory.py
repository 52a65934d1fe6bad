"""The maximum memory that a process has used."""

from __future__ import annotations

from pathlib import Path


def reset(process: int) -> None:
    """Begin to measure."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def peak_mib(process: int) -> int:
    """Return the maximum memory since `reset`."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) // 1024
