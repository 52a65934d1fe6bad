from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import Mock

import pytest

from engines.memory import garbage_collection
from engines.memory.garbage_collection import collect_after_load, importing, release_memory


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage_collection, "_loaded", False)
    monkeypatch.setattr(garbage_collection, "_models_exempt", False)
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def import_something(monkeypatch: pytest.MonkeyPatch) -> Cycle:
    """Import a module, and return the object that it has made."""
    with importing():
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, f"module_{len(sys.modules)}", ModuleType("module"))
        made = Cycle()
    assert gc.isenabled()
    return made


def is_looked_at(thing: object) -> bool:
    """Return True if the collector examines the object."""
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


def test_pytorch_gives_its_free_memory_of_gpus_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Mock()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    for initialized in (False, True):
        cuda.is_initialized.return_value = initialized
        release_memory()
        assert cuda.empty_cache.call_count == initialized
    cuda.empty_cache.side_effect = RuntimeError("an illegal memory access was encountered")
    release_memory()
    monkeypatch.setitem(sys.modules, "torch.cuda", ModuleType("torch.cuda"))
    release_memory()
