"""Gives back to the system the memory that a model has left behind."""

from __future__ import annotations

import ctypes
import gc


def release_memory() -> None:
    """Collect what nobody has any more, and give it back to the system, which counts what is free for the next model.

    What was there when a model was loaded is exempt from collection otherwise.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep less by themselves
    if malloc_trim is not None:
        malloc_trim(0)
