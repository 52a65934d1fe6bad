"""Finds the GPUs of this machine and their memory without loading a driver, and shares the GPUs among workers."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

logger = logging.getLogger(__name__)

_DEVICE_FILES = Path("/dev")
_DEVICE_FILE = re.compile(r"nvidia\d+").fullmatch
_WSL2 = "dxg"  # Under WSL2, all GPUs share this device file.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPU = frozenset({"cpu", "-1"})
_QUERY_SECONDS = 30.0
_FIGURES = ("index", "name", "driver_version", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu")
_MEBIBYTE = 1 << 20
_LISTED = re.compile(r"GPU \d+:")
_MACHINE = re.compile(r"(?P<count>\d{1,3})(?:x(?P<size>\d{1,6}(?:\.\d{1,3})?)(?P<unit>gib|gb))?").fullmatch
_UNITS = {"gib": 1 << 30, "gb": 10**9}
_MOST_GPUS = 128


class GpusUnknown(Exception):
    """The number of GPUs or their memory is unknown. The message states the reason."""


class SliceNotChosen(Exception):
    """Several GPUs are visible, and one of them is divided into MIG slices. CUDA's choice is unclear."""


def gpu_count() -> int:
    """Return the number of GPUs that this process sees."""
    files = os.listdir(_DEVICE_FILES)
    present = sum(1 for name in files if _DEVICE_FILE(name))
    if not present and _WSL2 in files:
        present = _listed_gpus()
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return present
    names = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    if any(name.strip().startswith("MIG-") for name in names):
        return min(present, 1)  # A process can use only one MIG slice.
    return min(present, len(names))


def gpu_memory(kind: Literal["free", "total"] = "free") -> tuple[int, ...]:
    """Return the free or total bytes of each GPU that this process sees, in CUDA's order.

    A MIG slice counts as a GPU. The values come from nvidia-smi. Asking the driver in this process would create a
    context on each GPU.

    Raises:
        GpusUnknown: nvidia-smi fails or does not show the memory.
        SliceNotChosen: CUDA_VISIBLE_DEVICES has to say which GPU or slice is meant.
    """
    return visible_memory(_nvidia_smi("-q", "-x"), os.environ.get(_VISIBLE), kind)


def gpu_figures(seconds: float) -> list[dict[str, str]]:
    """Return the figures that `_FIGURES` lists, by name, for each GPU of the machine. Empty without a GPU.

    Args:
        seconds: The time limit for nvidia-smi, which may hang if a GPU hangs.

    Raises:
        GpusUnknown: nvidia-smi fails.
    """
    if not gpu_count():
        return []
    lines = _nvidia_smi(f"--query-gpu={','.join(_FIGURES)}", "--format=csv,noheader", seconds=seconds).splitlines()
    return [dict(zip(_FIGURES, map(str.strip, line.split(",")), strict=False)) for line in lines]


def machine_gpus() -> tuple[int, ...]:
    """Return the total memory of each GPU that this process sees, in bytes. If it is unknown, return 0 for each."""
    count = gpu_count()
    if not count:
        return ()
    try:
        return gpu_memory("total")
    except (GpusUnknown, SliceNotChosen):
        return (0,) * count


def described_gpus(text: str) -> tuple[int, ...]:
    """Parse the GPUs of a machine from a string such as `4x24GiB`: the bytes of each, or 0 if only a count is given.

    Raises:
        ValueError: The string does not have this form.
    """
    found = _MACHINE("".join(text.split()).lower())
    if found is None:
        raise ValueError(f"{text!r} is not a number of GPUs and the memory of each; an example: 4x24GiB")
    count, size = int(found["count"]), float(found["size"] or 0)
    if not 1 <= count <= _MOST_GPUS:
        raise ValueError(f"{count} GPUs; allowed: 1 to {_MOST_GPUS}; an example: 4x24GiB")
    if found["size"] and size < 1:
        raise ValueError(f"GPUs of {found['size']} {found['unit']}; allowed: at least 1 GiB; an example: 4x24GiB")
    return (int(size * _UNITS[found["unit"] or "gib"]),) * count


def visible_memory(report: str, visible: str | None, kind: Literal["free", "total"]) -> tuple[int, ...]:
    """Compute the result of `gpu_memory` from a report.

    Args:
        report: The output of `nvidia-smi -q -x`.
        visible: The value of CUDA_VISIBLE_DEVICES.
        kind: Whether to return free or total bytes.
    """
    try:
        gpus = ElementTree.fromstring(report).findall("gpu")
    except ElementTree.ParseError as error:
        raise GpusUnknown(f"the output of nvidia-smi -q -x is not XML: {error}") from None
    names = [str(index) for index in range(len(gpus))] if visible is None else visible.split(",")
    chosen: list[ElementTree.Element] = []
    for name in map(str.strip, names):
        if name.startswith("MIG-"):
            raise GpusUnknown(f"nvidia-smi does not tell the memory of the slice {name}")
        if (gpu := _gpu(gpus, name)) is None:
            break  # As in CUDA, the GPUs after an unknown name are not visible.
        chosen.append(gpu)
    divided = [gpu for gpu in chosen if gpu.findtext("mig_mode/current_mig", "").strip() == "Enabled"]
    if divided and len(chosen) > 1:
        raise SliceNotChosen(
            f"{len(chosen)} GPUs are visible, and {len(divided)} of them are divided into MIG slices; "
            "set CUDA_VISIBLE_DEVICES to one slice (MIG-..., see nvidia-smi -L) or to GPUs that are not divided"
        )
    if divided:
        first = divided[0].find("mig_devices/mig_device")  # CUDA uses the first slice.
        if first is None:
            raise GpusUnknown("MIG is on, but the GPU has no MIG slice")
        return (_memory(first, "MIG slice 0", kind),)
    return tuple(_memory(gpu, f"GPU {index}", kind) for index, gpu in enumerate(chosen))


def device_groups(gpus: int, each: int, load_on: str) -> tuple[str, ...]:
    """Return a group of devices per worker. A group has `each` devices. Empty if the workers run on the CPU.

    As in LMI, `load_on` lists the first device of each group. If these groups overlap or contain devices that do not
    exist, `load_on` lists the devices of all groups instead.

    Raises:
        ValueError: `load_on` names a GPU that does not exist, or allows fewer GPUs than a worker needs.
    """
    chosen = allowed_devices(gpus, load_on)
    apart = all(after - before >= each for before, after in pairwise(sorted(chosen)))
    if chosen and apart and max(chosen) + each <= gpus:
        return tuple(",".join(map(str, range(first, first + each))) for first in chosen)
    if chosen and each > len(chosen):
        raise ValueError(f"a worker needs {each} GPUs; there are {len(chosen)}")
    return tuple(",".join(map(str, chosen[start : start + each])) for start in range(0, len(chosen) - each + 1, each))


def allowed_devices(gpus: int, load_on: str) -> tuple[int, ...]:
    """Return the GPUs that `load_on` (`load_on_devices`) allows: `*`, `cpu`, or GPUs such as `0;1` and `gpu0`.

    Empty for the CPU.

    Raises:
        ValueError: `load_on` names a GPU that does not exist.
    """
    names = _names(load_on)
    if not gpus or is_cpu(load_on):
        return ()
    if "*" in names:
        return tuple(range(gpus))
    return tuple(dict.fromkeys(_index(name, gpus) for name in names if name not in _CPU))


def is_cpu(load_on: str) -> bool:
    """Return True if `load_on` (`load_on_devices`) names the CPU and no GPU."""
    return all(name in _CPU for name in _names(load_on))


def _names(load_on: str) -> list[str]:
    return [name.strip().lower() for name in load_on.split(";") if name.strip()] or ["*"]


def _index(name: str, gpus: int) -> int:
    number = name.removeprefix("gpu")
    if not number.isdecimal() or int(number) >= gpus:
        raise ValueError(f"there is no device {name}; allowed: *, cpu, or GPUs from 0 to {gpus - 1}")
    return int(number)


@cache
def _listed_gpus() -> int:
    try:
        return len(_LISTED.findall(_nvidia_smi("-L")))
    except GpusUnknown as error:
        logger.warning("this is WSL2 with /dev/dxg, but no NVIDIA GPU is used: %s", error)
        return 0


def _nvidia_smi(*arguments: str, seconds: float = _QUERY_SECONDS) -> str:
    command = " ".join(("nvidia-smi", *arguments))
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        raise GpusUnknown("there is no program nvidia-smi") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpusUnknown(f"{command} failed: {error}") from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise GpusUnknown(f"{command} failed with {done.returncode}: {said}")
    return done.stdout


def _gpu(gpus: list[ElementTree.Element], name: str) -> ElementTree.Element | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names: by its index, its UUID, or the start of its UUID."""
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    if not name.startswith("GPU-"):
        return None
    return next((gpu for gpu in gpus if gpu.findtext("uuid", "").strip().startswith(name)), None)


def _memory(device: ElementTree.Element, name: str, kind: str) -> int:
    text = device.findtext(f"fb_memory_usage/{kind}", "").strip()
    try:
        return int(text.removesuffix(" MiB")) * _MEBIBYTE
    except ValueError:
        raise GpusUnknown(f"nvidia-smi does not tell the memory of {name}: {text or 'nothing'}") from None
