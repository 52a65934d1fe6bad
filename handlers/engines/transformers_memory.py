"""Running out of memory: how PyTorch says it, and what is done before going on."""

from __future__ import annotations

import gc
from typing import Any

import torch


class DeviceLost(Exception):
    """The device does not compute any more; nothing in this process will bring it back."""


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is not enough memory, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # PyTorch has no class for running out of the host's memory.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def free_memory(device: Any) -> None:
    """Free what a failed pass has left; to be called once its exception is gone, whose traceback holds tensors.

    Raises:
        DeviceLost: the device computes no more.
    """
    gc.collect()
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.ones(2, device=device).sum().item()
    except Exception as error:
        raise DeviceLost(str(error)) from error
