from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from handlers import memory_release
from handlers.memory_release import collect_after_load, importing, release_memory


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


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory_release, "_loaded", False)
    monkeypatch.setattr(memory_release, "_models_exempt", False)
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def import_something(monkeypatch: pytest.MonkeyPatch) -> Cycle:
    """Returns what the module has made."""
    with importing():
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, f"module_{len(sys.modules)}", ModuleType("module"))
        made = Cycle()
    assert gc.isenabled()
    return made


def is_looked_at(thing: object) -> bool:
    """Whether the collector does."""
    return any(one is thing for one in gc.get_objects())


def test_what_imports_make_is_exempt_from_collection_and_a_loaded_model_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = import_something(monkeypatch)
    model = Cycle()
    collect_after_load(model_is_here=True)
    assert not is_looked_at(imported)
    assert is_looked_at(model)
    release_memory()
    assert not is_looked_at(imported), "the next collection would look through it all"


def test_nothing_is_collected_as_an_import_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        with importing():
            monkeypatch.setitem(sys.modules, f"module_{len(sys.modules)}", ModuleType("module"))
            made = [Cycle() for _ in range(5 * gc.get_threshold()[0])]
        assert (len(phases), len(made) > 0) == (0, True)
    finally:
        gc.callbacks.remove(note)


def test_nothing_becomes_exempt_where_nothing_was_imported() -> None:
    with importing():
        model = Cycle()
    assert is_looked_at(model)


def test_a_model_is_released_also_where_something_was_imported_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Cycle()
    collect_after_load(model_is_here=True)
    import_something(monkeypatch)
    assert not is_looked_at(model)
    gone = weakref.ref(model)
    del model
    release_memory()
    assert gone() is None


def test_what_a_model_has_left_is_released() -> None:
    left = Cycle()
    gone = weakref.ref(left)
    del left
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
