"""Checks that objects are freed: one object, without a reference to it, or all that reference cycles hold."""

from __future__ import annotations

import gc
import threading
import weakref


def when_freed(observed: object) -> threading.Event:
    """An event that is set when the object is gone.

    To look at a weak reference holds the object for that moment, in which another thread may try to collect it.
    """
    freed = threading.Event()
    weakref.finalize(observed, freed.set)
    return freed


def bytes_in_cycles() -> int:
    """Collect the reference cycles, and return the length of all texts that only they held."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        texts = {
            id(text): len(text)
            for found in gc.garbage
            for text in (found, *gc.get_referents(found))
            if issubclass(type(text), bytes | bytearray | str)  # `isinstance` asks a dead weak proxy for its class
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
    return sum(texts.values())
