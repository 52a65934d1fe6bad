"""The classes that hold adapters, with vLLM but without an engine: adapters whose loading hangs, and adapters that
change places.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file

from engines.adapters import Adapter, AdapterOrder, AdapterRegistry
from engines.errors import AdapterFailed, AdapterUnusable, UnknownAdapter
from engines.statistics import EngineStatistics
from handlers.model_config import ModelConfig
from handlers.openai.current_call import OpenAICall
from handlers.queue import EngineQueue
from tests.freed import when_freed
from tests.waiting import until

pytestmark = pytest.mark.asyncio


class Llm:
    """A stand-in for the parts of AsyncLLM that `VllmAdapters` uses. Calls hang until `answers` is set."""

    errored = False

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_cpu_loras=4, max_loras=4, max_lora_rank=8))
        self.model_config = SimpleNamespace(model="/none")
        self.output_processor = SimpleNamespace(request_states={})
        self.answers = asyncio.Event()
        self.answers.set()
        self.orders: list[tuple[str, int]] = []

    async def add_lora(self, request: Any) -> bool:
        self.orders.append(("add", request.lora_int_id))
        await self.answers.wait()
        return True

    async def remove_lora(self, adapter_id: int) -> bool:
        self.orders.append(("remove", adapter_id))
        await self.answers.wait()
        return True


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    save_file({"none": np.zeros(4, dtype=np.float32)}, tmp_path / "adapter_model.safetensors")
    return tmp_path


@pytest.fixture
def llm() -> Any:
    return Llm()


@pytest_asyncio.fixture
async def adapters(llm: Any) -> AsyncIterator[Any]:
    from engines.vllm.lora import VllmAdapters

    adapters = VllmAdapters(llm, 60)
    yield adapters
    await adapters.stop()


def adapter(source: Path, number: int, name: str = "a", *, preload: bool = True) -> Adapter:
    return Adapter(name=name, src="", path=source, id=number, preload=preload)


async def test_a_refused_adapter_leaves_its_content_nowhere(
    adapters: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.vllm import lora

    class Content:
        """A file in memory."""

    read: list[threading.Event] = []

    def refused(*_: Any) -> None:
        content = Content()
        read.append(when_freed(content))
        raise AdapterFailed("it cannot be used")

    monkeypatch.setattr(lora, "read_ahead", refused)
    with pytest.raises(AdapterFailed):
        await adapters.add(adapter(source, 1))
    await adapters.add(adapter(source, 2, preload=False))
    for _ in range(2):
        with pytest.raises(AdapterUnusable):
            await adapters.claim("a")
    await until(lambda: len(read) == 3 and all(freed.is_set() for freed in read))


async def test_an_adapter_is_read_before_the_engine_stops_to_load_it(llm: Any, adapters: Any, source: Path) -> None:
    size = 16_000_000
    save_file({"none": np.zeros(size // 4, dtype=np.float32)}, source / "adapter_model.safetensors")
    before = bytes_read()
    await adapters.add(adapter(source, 1, preload=False))
    assert bytes_read() - before < size
    llm.answers.clear()
    claim = asyncio.create_task(adapters.claim("a"))
    await until(lambda: llm.orders)
    assert bytes_read() - before >= size
    llm.answers.set()
    (await claim).release()


def bytes_read() -> int:
    """Return the number of bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


async def test_a_model_ends_at_once_while_the_engine_does_not_answer_to_a_new_adapter(
    llm: Any, adapters: Any, source: Path
) -> None:
    from handlers.custom.formatters import Formatters
    from handlers.formatter_thread import FormatterThread
    from handlers.lmi.management.engine_adapters import EngineAdapterHost

    host = EngineAdapterHost(adapters, llm, lambda _: llm, Formatters(FormatterThread(60)))
    registry = AdapterRegistry(host, source)
    llm.answers.clear()
    order = asyncio.create_task(registry.register(AdapterOrder(name="a", src=str(source))))
    await until(lambda: llm.orders)
    async with asyncio.timeout(60):
        await registry.stop()
        await adapters.stop()
        await asyncio.wait({order})
    assert order.cancelled()
    assert registry.all() == ()


async def test_a_call_whose_adapter_gave_way_meanwhile_gets_the_one_in_its_place(
    llm: Any, adapters: Any, source: Path
) -> None:
    from handlers.openai.vllm.engine_client import EngineClient

    await adapters.add(adapter(source, 1))
    looked_up = adapters.public["a"]  # vLLM's front end looks it up before it reads the prompt
    await adapters.add(adapter(source, 2))
    await adapters.remove(1)
    engine: Any = SimpleNamespace(async_llm=llm, adapters=adapters, claim=adapters.claim)
    client = EngineClient(engine, ModelConfig(name="model", model_dir=source, model_id="m"))
    call = OpenAICall(EngineQueue(SimpleNamespace(statistics=EngineStatistics()), 4))  # type: ignore[arg-type]
    taken = await client._adapter(call, looked_up.lora_name)
    assert (taken.lora_int_id, taken.lora_name) == (2, "a#2")
    removal = asyncio.create_task(adapters.remove(2))
    await asyncio.sleep(0.3)
    assert not removal.done()  # the call has it
    assert await client._adapter(call, "a") is taken  # and looks it up again, like a beam search
    with pytest.raises(UnknownAdapter):
        await adapters.claim("a")
    call.close()
    await asyncio.wait_for(removal, 60)
    assert llm.orders[-1] == ("remove", 2)


async def test_a_removed_adapter_stays_for_calls_that_wait_for_the_next_engine(
    llm: Any, adapters: Any, source: Path
) -> None:
    await adapters.add(adapter(source, 1))
    running = llm.output_processor.request_states
    running["r"] = SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=1))
    removal = asyncio.create_task(adapters.remove(1))
    await asyncio.sleep(0.3)  # No copy runs.
    await adapters.load_into(llm.add_lora, is_only=True)
    assert adapters.is_loaded(1)
    del running["r"]
    await asyncio.wait_for(removal, 60)
    assert not adapters.is_loaded(1)


async def test_a_removed_adapter_that_the_next_engine_still_loads_is_dropped_after_it(
    llm: Any, adapters: Any, source: Path
) -> None:
    await adapters.add(adapter(source, 1))
    running = llm.output_processor.request_states
    running["r"] = SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=1))
    removal = asyncio.create_task(adapters.remove(1))
    llm.answers.clear()
    again = asyncio.create_task(adapters.load_into(llm.add_lora, is_only=True))
    await until(lambda: llm.orders.count(("add", 1)) == 2)
    del running["r"]
    await asyncio.sleep(0.3)
    assert not removal.done()
    llm.answers.set()
    await asyncio.wait_for(asyncio.gather(again, removal), 60)
    assert llm.orders[-1] == ("remove", 1)


async def test_files_of_an_adapter_may_change_until_it_is_loaded_for_the_first_time(
    llm: Any, adapters: Any, source: Path
) -> None:
    await adapters.add(adapter(source, 1, preload=False))
    weights = source / "adapter_model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + b"\x3f")
    (await adapters.claim("a")).release()
    await adapters.load_into(llm.add_lora, is_only=True)
    weights.write_bytes(before)
    with pytest.raises(AdapterUnusable, match="register it again"):
        await adapters.claim("a")


async def test_an_adapter_whose_files_change_while_the_engine_reads_them_is_refused(
    llm: Any, adapters: Any, source: Path
) -> None:
    llm.answers.clear()
    adding = asyncio.create_task(adapters.add(adapter(source, 1)))
    await until(lambda: llm.orders)
    (source / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 9}))
    llm.answers.set()
    with pytest.raises(AdapterFailed, match="have changed"):
        await adding
    assert llm.orders == [("add", 1), ("remove", 1)]


@pytest.mark.parametrize("is_only", [True, False])
async def test_a_further_copy_gets_idle_adapters_as_well(llm: Any, adapters: Any, source: Path, is_only: bool) -> None:
    """Each copy that serves has the adapters, so that requests find them.

    If no copy serves, an idle adapter is loaded at its next request.
    """
    for number, (name, preload) in enumerate(
        {"idle": False, "used": False, "preloaded": True, "new": False}.items(), 1
    ):
        await adapters.add(adapter(source, number, name, preload=preload))
    (await adapters.claim("idle")).release()
    used = await adapters.claim("used")
    sent: list[str] = []

    async def add(request: Any) -> None:
        sent.append(request.lora_name)

    await adapters.load_into(add, is_only=is_only)
    assert sent == (["used#2", "preloaded#3"] if is_only else ["idle#1", "used#2", "preloaded#3"])
    assert [adapters.is_loaded(number) for number in (1, 2, 3, 4)] == [not is_only, True, True, False]
    used.release()


async def test_a_copy_that_dies_while_adapters_are_loaded_into_it_costs_no_adapter(
    llm: Any, adapters: Any, source: Path
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    await adapters.add(adapter(source, 1))
    await adapters.add(adapter(source, 2, "b"))

    async def dies(_: Any) -> None:
        raise EngineDeadError

    async def refuses(request: Any) -> None:
        if request.lora_int_id == 1:
            raise RuntimeError("Call to add_lora method failed: no")

    with pytest.raises(EngineDeadError):
        await adapters.load_into(dies, is_only=False)
    assert adapters.is_loaded(1)
    assert adapters.is_loaded(2)
    await adapters.load_into(refuses, is_only=False)
    assert not adapters.is_loaded(1), "its requests fail"
    assert adapters.is_loaded(2)
