"""The one place that rules the garbage collector: while a model is loaded, after that, and after one is gone.

A loaded model is hundreds of thousands of objects that live as long as it does. They are exempt from collection
(`gc.freeze`), so that the automatic ones stay short.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator

_THRESHOLDS = (20_000, 50, 50)
"""Requests leave no reference cycles behind, so there is little to look for."""
_LONGEST_COLLECTION_SECONDS = 60.0

_collecting = threading.Lock()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep automatic collections out of an import, and what it made out of later ones.

    They find nothing there. They took a quarter of the time of vLLM's import, and as much again until it was loaded.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def exempt_loaded_model() -> None:
    """Collect what loading has left behind, and exempt what exists now from collection.

    Holds up all threads, for a second where vLLM is loaded.
    """
    with _collecting:
        _collect()
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)


def release_memory() -> None:
    """Free all that nobody refers to, models among it, and give it back to the system.

    What is free there decides which models still fit. Holds up all threads, for a second where vLLM is loaded.
    """
    with _collecting:
        gc.unfreeze()
        _collect()
        gc.freeze()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep less by themselves
    if malloc_trim is not None:
        malloc_trim(0)


def _collect() -> None:
    """Run a whole collection; if another thread is in the middle of one, wait for its end first.

    `gc.collect` returns at once in that case, without a word. `gc.callbacks` tell whether it has done anything.
    """
    caller, ran, ended = threading.get_ident(), False, threading.Event()

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal ran
        if phase == "stop":
            ran = ran or threading.get_ident() == caller
            ended.set()

    gc.callbacks.append(note)
    try:
        gc.collect()
        if not ran:
            ended.wait(_LONGEST_COLLECTION_SECONDS)
            gc.collect()
    finally:
        gc.callbacks.remove(note)
