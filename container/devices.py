"""The GPUs of this machine, told without loading a driver, and how a handler's workers share them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEVICE_FILES = Path("/dev")
_DEVICE_FILE = re.compile(r"nvidia\d+").fullmatch
_CPU = frozenset({"cpu", "-1"})


def gpu_count(environ: Mapping[str, str] = os.environ) -> int:
    """How many GPUs a process of this one sees."""
    present = sum(1 for name in os.listdir(_DEVICE_FILES) if _DEVICE_FILE(name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def device_groups(gpus: int, each: int, load_on: str) -> tuple[str, ...]:
    """The devices of one worker each, `each` of them; none where workers run on the CPU (contracts/lmi.md 2.10).

    `load_on`: what `load_on_devices` says: `*`, `cpu`, or GPUs such as `0;1` and `gpu0`.

    Raises:
        ValueError: it names a GPU that is not there, or there are fewer than a worker needs.
    """
    names = [name.strip().lower() for name in load_on.split(";") if name.strip()] or ["*"]
    if not gpus or all(name in _CPU for name in names):
        return ()
    chosen = list(range(gpus)) if "*" in names else [_index(name, gpus) for name in names if name not in _CPU]
    if each > len(chosen):
        raise ValueError(f"a worker needs {each} GPUs; there are {len(chosen)}")
    return tuple(",".join(map(str, chosen[start : start + each])) for start in range(0, len(chosen) - each + 1, each))


def _index(name: str, gpus: int) -> int:
    number = name.removeprefix("gpu")
    if not number.isdecimal() or int(number) >= gpus:
        raise ValueError(f"there is no device {name}; allowed: *, cpu, or GPUs from 0 to {gpus - 1}")
    return int(number)
