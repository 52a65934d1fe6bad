"""Gives back to the system the memory that a model has left behind."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref

_TRIES = 100
_PAUSE_SECONDS = 0.01


class _Cycle:
    """Goes when the collector looks at the oldest objects, and not before."""

    def __init__(self) -> None:
        self.itself = self


def release_memory() -> None:
    """Collect what nobody has any more, and give it back to the system, which counts what is free for the next model.

    What was there when a model was loaded is exempt from collection otherwise.
    """
    _collect()
    gc.freeze()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep less by themselves
    if malloc_trim is not None:
        malloc_trim(0)


def _collect() -> None:
    """A whole collection, begun now.

    `gc.collect` does nothing, and says nothing, while another thread collects; and another thread may exempt at any
    moment what is there. What is exempted then stays until the next release.
    """
    mark = weakref.ref(_Cycle())
    for _ in range(_TRIES):
        gc.freeze()
        gc.unfreeze()  # all objects, the mark too, count as the oldest now
        gc.collect()
        if mark() is None:
            return
        time.sleep(_PAUSE_SECONDS)
