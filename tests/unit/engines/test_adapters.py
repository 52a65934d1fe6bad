"""The registry of adapters: the names of adapters, concurrent orders for a name, and orders whose clients leave."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.adapters import Adapter, AdapterOrder, AdapterRegistry
from engines.errors import AdapterConflict, AdapterFailed, InvalidParameter, InvalidRequest, UnknownAdapter
from handlers.custom.formatters import Formatters
from handlers.formatter_thread import FormatterThread
from handlers.lmi.management.engine_adapters import EngineAdapterHost
from tests.waiting import until


class Host:
    """A host that does nothing. The test decides how long this takes."""

    def __init__(self, reads_src: bool = False) -> None:
        self.reads_src = reads_src
        self.calls: list[tuple[str, Adapter]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.failure: AdapterFailed | None = None

    async def register(self, adapter: Adapter) -> str:
        return await self._do("register", adapter)

    async def update(self, adapter: Adapter) -> str:
        return await self._do("update", adapter)

    async def unregister(self, adapter: Adapter) -> str:
        return await self._do("unregister", adapter)

    async def stop(self) -> None: ...

    async def _do(self, what: str, adapter: Adapter) -> str:
        self.calls.append((what, adapter))
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure
        return ""


def make() -> tuple[Host, AdapterRegistry]:
    host = Host()
    return host, AdapterRegistry(host, Path("/model"), {"model", ""})


ORDER = AdapterOrder(name="a", src="/x")


@pytest.mark.parametrize(
    ("src", "path"),
    [
        ("/x/y", "/x/y"),
        ("adapters/y", "/model/adapters/y"),
        ("file:///x/y%20z", "/x/y z"),
        ("file:/x/y%20z", "/x/y z"),
        ("FILE://localhost/x", "/x"),
    ],
)
async def test_a_source_is_a_directory_of_this_machine(src: str, path: str) -> None:
    host, registry = make()
    await registry.register(AdapterOrder(name="a", src=src))
    assert host.calls[0][1].path == Path(path)
    assert registry.get("a").src == src


@pytest.mark.parametrize("src", ["s3://b/x", "https://h/x", "file://other/x", "hf://[x", "/a\0b", "file:///%00"])
async def test_a_source_elsewhere_is_a_wrong_parameter(src: str) -> None:
    _, registry = make()
    with pytest.raises(InvalidParameter, match="`src`"):
        await registry.register(AdapterOrder(name="a", src=src))


@pytest.mark.parametrize("src", ["an-id", "s3://b/x", "https://h/x", "file://other/x", "hf://[x", "adapters/y", "/x"])
async def test_a_source_is_the_affair_of_a_host_that_reads_it(src: str) -> None:
    host = Host(reads_src=True)
    registry = AdapterRegistry(host, Path("/model"))
    await registry.register(AdapterOrder(name="a", src="first"))
    await registry.update(AdapterOrder(name="a", src=src))
    assert [(what, adapter.src) for what, adapter in host.calls] == [("register", "first"), ("update", src)]
    await registry.update(AdapterOrder(name="a", pin=True))
    assert registry.get("a").src == src


async def test_a_source_that_a_host_reads_is_checked_as_a_directory_where_it_may_be_one(tmp_path: Path) -> None:
    checked: list[Path] = []
    registry = AdapterRegistry(Host(reads_src=True), tmp_path, faults=lambda path: checked.append(path) or ())
    for src in ("one", "file:///two", "s3://b/x"):
        await registry.register(AdapterOrder(name=src.partition(":")[0], src=src))
    assert checked == [tmp_path / "one", Path("/two"), tmp_path / "s3://b/x"]
    registry = AdapterRegistry(Host(reads_src=True), tmp_path, faults=lambda path: ("no",) if path.name == "b" else ())
    await registry.register(AdapterOrder(name="a", src="a"))
    with pytest.raises(InvalidRequest, match="no"):
        await registry.update(AdapterOrder(name="a", src="b"))
    assert registry.get("a").src == "a"


async def test_what_the_host_refuses_changes_nothing() -> None:
    host = Host(reads_src=True)
    registry = AdapterRegistry(host, Path("/model"))
    host.failure = AdapterFailed("broken")
    with pytest.raises(AdapterFailed, match="broken"):
        await registry.register(ORDER)
    assert registry.all() == ()
    host.failure = None
    await registry.register(ORDER)
    host.failure = AdapterFailed("broken")
    with pytest.raises(AdapterFailed, match="broken"):
        await registry.update(AdapterOrder(name="a", src="other"))
    assert registry.get("a").src == "/x"
    with pytest.raises(AdapterFailed, match="broken"):
        await registry.unregister("a")
    assert "a" in registry


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "x" * 1_000_000, ".", "..", "model"])
async def test_a_name_that_cannot_be_is_a_conflict(name: str) -> None:
    _, registry = make()
    with pytest.raises(AdapterConflict, match="name") as refused:
        await registry.register(AdapterOrder(name=name, src="/x"))
    assert len(refused.value.message) < 400


async def test_a_name_is_taken_until_it_is_given_back_and_an_id_for_ever() -> None:
    _, registry = make()
    await registry.register(ORDER)
    with pytest.raises(AdapterConflict):
        await registry.register(ORDER)
    first = registry.get("a").id
    await registry.unregister("a")
    with pytest.raises(UnknownAdapter):
        registry.get("a")
    await registry.register(ORDER)
    assert registry.get("a").id > first


async def test_orders_for_one_name_do_not_meet() -> None:
    host, registry = make()
    host.go_on.clear()
    first = asyncio.create_task(registry.register(ORDER))
    await until(lambda: host.calls)
    with pytest.raises(AdapterConflict):
        await registry.register(ORDER)
    host.go_on.set()
    await first
    assert "a" in registry


async def test_an_order_whose_client_leaves_is_carried_out() -> None:
    host, registry = make()
    host.go_on.clear()
    order = asyncio.create_task(registry.register(ORDER))
    await until(lambda: host.calls)
    order.cancel()
    await asyncio.wait({order})
    assert "a" not in registry
    host.go_on.set()
    await until(lambda: "a" in registry)


async def test_a_name_is_unknown_as_soon_as_it_is_unregistered_and_may_be_used_again_at_once() -> None:
    host, registry = make()
    await registry.register(ORDER)
    host.go_on.clear()
    leaving = asyncio.create_task(registry.unregister("a"))
    await until(lambda: "a" not in registry)
    with pytest.raises(UnknownAdapter):
        await registry.unregister("a")
    coming = asyncio.create_task(registry.register(replace(ORDER, src="/y")))
    await until(lambda: len(host.calls) == 3)
    host.go_on.set()
    await asyncio.gather(leaving, coming)
    assert registry.get("a").src == "/y"


async def test_of_orders_that_come_together_one_removes_the_adapter_and_the_others_do_not_know_it() -> None:
    host, registry = make()
    await registry.register(ORDER)
    orders = (
        registry.unregister("a"),
        registry.unregister("a"),
        registry.update(AdapterOrder(name="a", preload=False)),
    )
    removed, *others = await asyncio.gather(*orders, return_exceptions=True)
    assert removed == ""
    assert [type(other) for other in others] == [UnknownAdapter, UnknownAdapter]
    assert registry.all() == ()
    assert [what for what, _ in host.calls] == ["register", "unregister"]


async def test_an_adapter_in_the_place_of_another_keeps_what_the_order_does_not_give() -> None:
    host, registry = make()
    await registry.register(replace(ORDER, pin=True, alias="shown", options={"k": "1", "l": "1"}))
    await registry.register(AdapterOrder(name="a", src="/y", options={"l": "2"}), replacing=True)
    assert [call for call, _ in host.calls] == ["register", "register"]
    adapter = registry.get("a")
    assert (adapter.src, adapter.pin, adapter.alias, adapter.options) == ("/y", True, "shown", {"k": "1", "l": "2"})
    await registry.register(AdapterOrder(name="a", src="/z", pin=False, preload=False), replacing=True)
    assert (registry.get("a").pin, registry.get("a").preload) == (False, False)


async def test_an_update_changes_what_it_names() -> None:
    _, registry = make()
    await registry.register(replace(ORDER, preload=False, options={"k": "1"}))
    await registry.update(AdapterOrder(name="a", preload=True, pin=True, options={"l": "2"}))
    adapter = registry.get("a")
    assert (adapter.preload, adapter.pin, adapter.options) == (True, True, {"k": "1", "l": "2"})
    await registry.update(AdapterOrder(name="a", src="/x"))
    assert registry.get("a").pin


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (AdapterOrder(name="a", src="/y"), "src"),
        (AdapterOrder(name="a", pin=False), "pinned"),
        (AdapterOrder(name="a", preload=False), "pin is true and preload false"),
    ],
)
async def test_what_an_update_cannot_change_is_refused(change: AdapterOrder, why: str) -> None:
    _, registry = make()
    await registry.register(replace(ORDER, pin=True))
    with pytest.raises(AdapterFailed, match=why):
        await registry.update(change)
    assert registry.get("a").pin


async def test_an_update_of_an_unknown_adapter_says_so() -> None:
    _, registry = make()
    with pytest.raises(UnknownAdapter, match="'a'"):
        await registry.update(ORDER)
    with pytest.raises(AdapterFailed, match=r"pin .*preload"):
        await registry.register(replace(ORDER, pin=True, preload=False))


async def test_adapters_that_come_with_the_model_are_registered_in_order(tmp_path: Path) -> None:
    for name in ("m/adapters/b", "m/adapters/a", "m/adapters/.hidden", "n/adapters/c", "n/adapters/a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "m/adapters/file").touch()
    _, registry = make()
    await registry.preload((tmp_path / "m", tmp_path / "n", tmp_path / "nowhere"))
    sources = {adapter.name: adapter.src for adapter in registry.all()}
    assert sources == {
        name: str(tmp_path / place)
        for name, place in {"a": "m/adapters/a", "b": "m/adapters/b", "c": "n/adapters/c"}.items()
    }


class HubAndS3:
    """Implements `AdapterDownloads`, without a network."""

    async def fetch(self, url: str) -> Path:
        if url.endswith("/missing"):
            raise InvalidParameter("src", "cannot be fetched: 404")
        return Path("/fetched", url.rpartition("/")[2])


async def test_adapters_that_the_settings_name_are_registered_before_those_beside_the_model(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    registry = AdapterRegistry(Host(), tmp_path, downloads=HubAndS3())
    declared = {"a": "/other", "org/name": "hf://org/name@v2", "s": "s3://bucket/s"}
    await registry.preload((tmp_path,), declared)
    assert {adapter.name: (adapter.src, str(adapter.path)) for adapter in registry.all()} == {
        "a": ("/other", "/other"),
        "b": (f"{tmp_path}/adapters/b", f"{tmp_path}/adapters/b"),
        "org/name": ("/fetched/name@v2", "/fetched/name@v2"),
        "s": ("s3://bucket/s", "/fetched/s"),
    }
    with pytest.raises(AdapterConflict):
        await registry.register(AdapterOrder(name="org/other", src="/x"))
    with pytest.raises(InvalidParameter):
        await registry.register(AdapterOrder(name="c", src="hf://org/name"))
    await registry.unregister("org/name")
    assert "org/name" not in registry


async def test_an_adapter_that_comes_with_the_model_and_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "a").mkdir(parents=True)
    host, registry = make()
    host.failure = AdapterFailed("broken")
    with pytest.raises(AdapterFailed, match=f"{tmp_path}/adapters .*broken"):
        await registry.preload((tmp_path,))
    registry = AdapterRegistry(Host(), tmp_path, faults=lambda _: ("there is a model.py",))
    with pytest.raises(InvalidRequest, match=rf"{tmp_path}/adapters .*model\.py"):
        await registry.preload((tmp_path,))
    registry = AdapterRegistry(Host(), tmp_path, downloads=HubAndS3())
    with pytest.raises(InvalidRequest, match=r"hf://org/missing .*404"):
        await registry.preload((), {"m": "hf://org/missing"})


async def test_an_adapter_on_s3_is_fetched() -> None:
    registry = AdapterRegistry(Host(), Path("/model"), downloads=HubAndS3())
    await registry.register(AdapterOrder(name="a", src="s3://b/x"))
    assert (registry.get("a").src, registry.get("a").path) == ("s3://b/x", Path("/fetched/x"))
    await registry.register(AdapterOrder(name="a", src="S3://b/y"), replacing=True)
    assert registry.get("a").path == Path("/fetched/y")


async def test_nothing_is_kept_of_an_adapter_on_s3_that_cannot_be_registered() -> None:
    registry = AdapterRegistry(Host(), Path("/model"), faults=lambda _: ("there is a model.py",), downloads=HubAndS3())
    with pytest.raises(InvalidParameter, match="`src`"):
        await registry.register(AdapterOrder(name="a", src="s3://b/missing"))
    with pytest.raises(InvalidRequest, match=r"there is a model\.py"):
        await registry.register(AdapterOrder(name="a", src="s3://b/x"))
    assert registry.all() == ()


class Engine:
    """An engine that accepts or refuses adapters. A real engine needs a model to refuse an adapter."""

    refuses = False

    async def add(self, adapter: Adapter) -> None:
        if self.refuses:
            raise AdapterFailed("it does not fit")

    async def change(self, adapter: Adapter) -> None: ...

    async def remove(self, adapter_id: int, *, wait: bool = True) -> None: ...


async def test_only_adapters_that_are_there_have_their_formatters_loaded(tmp_path: Path) -> None:
    engine, before = Engine(), set(sys.modules)
    otherwise: Any = None
    host = EngineAdapterHost(engine, otherwise, lambda _: otherwise, Formatters(FormatterThread(60)))
    registry = AdapterRegistry(host, tmp_path)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(
            "from djl_python.output_formatter import output_formatter\n\n\n"
            "@output_formatter\n"
            "def write(token, first_token, last_token, details, generated_text, request_id): ...\n"
        )
    first, second = (AdapterOrder(name="a", src=name) for name in ("first", "second"))

    engine.refuses = True
    with pytest.raises(AdapterFailed):
        await registry.register(first)
    assert set(sys.modules) == before

    engine.refuses = False
    await registry.register(first)
    [module] = set(sys.modules) - before
    engine.refuses = True
    with pytest.raises(AdapterFailed):  # the same file again: the first module keeps its name
        await registry.register(first, replacing=True)
    assert set(sys.modules) - before == {module}

    engine.refuses = False
    await registry.register(second, replacing=True)
    [other] = set(sys.modules) - before
    assert other != module
    await registry.stop()
    assert set(sys.modules) == before
