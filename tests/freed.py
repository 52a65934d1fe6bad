"""Checks that objects are freed: a single object, or all objects that are held only by reference cycles."""

from __future__ import annotations

import gc
import threading
import weakref


def when_freed(observed: object) -> threading.Event:
    """Return an event that is set when the object is freed.

    Checking a weak reference would briefly hold the object, and another thread may run the collector at that moment.
    """
    freed = threading.Event()
    weakref.finalize(observed, freed.set)
    return freed


def bytes_in_cycles() -> int:
    """Collect the reference cycles, and return the total length of the texts that only the cycles held."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        texts = {
            id(text): len(text)
            for found in gc.garbage
            for text in (found, *gc.get_referents(found))
            if issubclass(type(text), bytes | bytearray | str)  # `isinstance` would query a dead weak proxy.
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
    return sum(texts.values())
