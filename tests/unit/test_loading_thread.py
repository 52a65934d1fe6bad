"""Loading a model in a thread that may be given up."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from handlers.engines.loading_thread import load_in_thread

pytestmark = pytest.mark.asyncio


class Model:
    """As models are, one that only the collector of reference cycles frees."""

    def __init__(self) -> None:
        self.layers = [self]


@pytest.fixture(autouse=True)
def no_collection_by_itself() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_it_gives_what_was_loaded_or_raises_what_was_raised() -> None:
    def broken() -> Model:
        raise ValueError("no such file")

    assert isinstance(await load_in_thread(Model), Model)
    with pytest.raises(ValueError, match="no such file"):
        await load_in_thread(broken)


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_load_that_was_given_up_has_made_is_freed_when_it_ends(fails: bool) -> None:
    may_end, freed, made = threading.Event(), threading.Event(), []

    def load() -> Model:
        model = Model()
        # To look at the reference itself would hold the model for a moment, in which it might not be collected.
        made.append(weakref.ref(model, lambda _: freed.set()))
        assert may_end.wait(10)
        if fails:
            raise ValueError("too late")
        return model

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(load_in_thread(load), 0.05)
    assert not freed.is_set()
    may_end.set()
    assert await asyncio.to_thread(freed.wait, 10)
