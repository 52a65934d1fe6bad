from __future__ import annotations

import gc
import threading
import weakref

from handlers.memory_release import exempt_loaded_model, release_memory


class Cycle:
    def __init__(self) -> None:
        self.itself = self


class Slow(Cycle):
    """Keeps the collector that frees it from ending."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.begun.set()
        self.may_end.wait(60)


def test_what_is_exempt_from_collection_is_released() -> None:
    left = Cycle()
    gone = weakref.ref(left)
    gc.freeze()
    del left
    gc.collect()
    assert gone() is not None
    release_memory()
    assert gone() is None


def test_memory_is_released_also_where_another_thread_collects_at_the_same_time() -> None:
    slow = Slow()
    begun, may_end = slow.begun, slow.may_end
    collecting = threading.Thread(target=gc.collect)
    del slow
    collecting.start()
    assert begun.wait(60)
    left = Cycle()
    gone = weakref.ref(left)
    del left
    gc.collect()
    assert gone() is not None, "a collector beside another does something now"
    threading.Timer(0.1, may_end.set).start()
    release_memory()
    assert gone() is None
    collecting.join()


def test_threads_that_release_memory_at_the_same_time_take_turns() -> None:
    slow = Slow()
    begun, may_end = slow.begun, slow.may_end
    first = threading.Thread(target=release_memory)
    del slow
    first.start()
    assert begun.wait(60)
    left = Cycle()
    gone = weakref.ref(left)
    del left
    second = threading.Thread(target=release_memory)
    second.start()
    may_end.set()
    for thread in (first, second):
        thread.join(60)
    assert gone() is None


def test_what_a_loaded_model_consists_of_is_exempt_from_collection() -> None:
    thresholds, held = gc.get_threshold(), Cycle()
    try:
        exempt_loaded_model()
        assert held.itself is held
        assert all(one is not held for one in gc.get_objects()), "the collector still looks at it"
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
