"""A check that an object is freed, without a reference to it."""

from __future__ import annotations

import threading
import weakref


def when_freed(observed: object) -> threading.Event:
    """An event that is set when the object is gone.

    To look at a weak reference holds the object for that moment, in which another thread may try to collect it.
    """
    freed = threading.Event()
    weakref.finalize(observed, freed.set)
    return freed
