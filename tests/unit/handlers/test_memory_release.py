from __future__ import annotations

import gc
import threading
import weakref

import pytest

from handlers.memory_release import release_memory


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


def test_memory_is_released_also_where_another_thread_exempts_it_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collect, tries = gc.collect, []

    def beside_another() -> int:
        tries.append(len(tries))
        if len(tries) == 1:
            gc.freeze()  # a model that became ready, say, whose load exempts what is there
        return collect()

    left = Cycle()
    gone = weakref.ref(left)
    del left
    monkeypatch.setattr(gc, "collect", beside_another)
    release_memory()
    assert gone() is None
    assert tries == [0, 1]
