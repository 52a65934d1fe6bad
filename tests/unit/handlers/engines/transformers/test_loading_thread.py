"""Loading a model in a thread that may be given up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from handlers.engines.transformers.model import load_in_thread
from tests.freed import when_freed

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_collection_by_itself")]


class Model:
    """As models are, one that only the collector of reference cycles frees."""

    def __init__(self) -> None:
        self.layers = [self]


async def test_it_gives_what_was_loaded_or_raises_what_was_raised() -> None:
    def broken() -> Model:
        raise ValueError("no such file")

    assert isinstance(await load_in_thread(Model), Model)
    with pytest.raises(ValueError, match="no such file"):
        await load_in_thread(broken)


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_load_that_was_given_up_has_made_is_freed_when_it_ends(fails: bool) -> None:
    may_end, freed = threading.Event(), []

    def load() -> Model:
        model = Model()
        freed.append(when_freed(model))
        assert may_end.wait(10)
        if fails:
            raise ValueError("too late")
        return model

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(load_in_thread(load), 0.05)
    assert not freed[0].is_set()
    may_end.set()
    assert await asyncio.to_thread(freed[0].wait, 10)
