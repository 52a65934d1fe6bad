"""Adapters that a customer's handler loads in real workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.adapters import AdapterOrder, AdapterRegistry
from engines.errors import AdapterFailed, NoRoomForAdapter
from handlers.contract import ContractError
from tests.unit.handlers.custom.harness import MODELS, Client, serving
from tests.waiting import pass_time, until


@contextlib.asynccontextmanager
async def handling(**more: Any) -> AsyncIterator[tuple[Client, AdapterRegistry]]:
    async with serving("adapters", **more) as client:
        registry = AdapterRegistry(client.handler.adapter_host, MODELS / "adapters")
        client.handler.adapters = registry
        yield client, registry


def order(directory: Path, name: str = "a", **options: str) -> AdapterOrder:
    return AdapterOrder(name=name, src=str(directory), options=options)


async def ask(client: Client, adapter: str = "") -> Any:
    query = {"adapter": adapter} if adapter else {}
    return json.loads((await client.ask("x", query=query)).body)


async def known(client: Client, workers: int) -> list[tuple[str, ...]]:
    """Return the adapters that each worker knows. The worker with the fewest calls answers first."""
    seen: dict[int, tuple[str, ...]] = {}
    while len(seen) < workers:
        replies = [await client.send("x") for _ in range(workers)]
        for writer, _ in replies:
            said = json.loads((await writer.done()).body)
            seen[said["pid"]] = tuple(said["known"])
    return list(seen.values())


async def test_every_worker_is_told_name_alias_source_and_options(tmp_path: Path) -> None:
    async with handling(min_workers=2, max_workers=2) as (client, registry):
        given = AdapterOrder(name="a", src=str(tmp_path), alias="nice", options={"k": "ü"})
        assert await registry.register(given) == ""
        assert await known(client, 2) == [("a",), ("a",)]
        said = (await ask(client, "a"))["adapter"]
        contents = {"name": "a", "alias": "nice", "src": str(tmp_path), "preload": "true", "pin": "false", "k": "ü"}
        properties = {f"property_{name}": contents[name] for name in ("name", "alias", "src")}
        assert said == contents | properties
        await registry.update(AdapterOrder(name="a", preload=False))
        assert (await ask(client, "a"))["adapter"]["preload"] == "false"
        await registry.unregister("a")
        assert await known(client, 2) == [(), ()]


@pytest.mark.parametrize("src", ["an-id", "s3://bucket/adapter", "beside/it"])
async def test_a_source_reaches_the_handler_as_it_was_given(src: str) -> None:
    async with handling() as (client, registry):
        await registry.register(AdapterOrder(name="a", src=src))
        said = (await ask(client, "a"))["adapter"]
        assert (said["src"], said["property_src"]) == (src, src)


async def test_another_source_reaches_all_workers_and_those_that_start_later() -> None:
    async with handling(min_workers=2, max_workers=2) as (client, registry):
        await registry.register(AdapterOrder(name="a", src="old"))
        await registry.update(AdapterOrder(name="a", src="new", options={"k": "v"}))
        pids = set(client.pids)
        assert {(await ask(client, "a"))["adapter"]["src"] for _ in range(4)} == {"new"}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(client.pids) == 2 and not pids & set(client.pids))
        said = [(await ask(client, "a"))["adapter"] for _ in range(4)]
        assert {(one["src"], one["k"]) for one in said} == {("new", "v")}


async def test_where_one_worker_refuses_another_source_all_keep_the_former() -> None:
    async with handling(min_workers=2, max_workers=2) as (client, registry):
        await registry.register(AdapterOrder(name="a", src="old"))
        with pytest.raises(AdapterFailed, match="not in this worker"):
            await registry.update(AdapterOrder(name="a", src="new", options={"not_in": str(client.pids[1])}))
        assert {(await ask(client, "a"))["adapter"]["src"] for _ in range(4)} == {"old"}
        assert registry.get("a").src == "old"


async def test_what_the_handler_says_becomes_the_status(tmp_path: Path) -> None:
    async with handling() as (_, registry):
        assert await registry.register(order(tmp_path, say="it is here")) == "it is here"


async def test_a_handler_that_refuses_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    async with handling() as (client, registry):
        with pytest.raises(AdapterFailed, match="this adapter is broken"):
            await registry.register(order(tmp_path, switch="error"))
        with pytest.raises(NoRoomForAdapter, match="no more adapters"):
            await registry.register(order(tmp_path, switch="memory"))
        assert registry.all() == ()
        assert await known(client, 1) == [()]
        await registry.register(order(tmp_path, stays="true"))
        with pytest.raises(AdapterFailed, match="this adapter stays"):
            await registry.unregister("a")
        assert "a" in registry


async def test_where_one_worker_refuses_no_worker_keeps_the_adapter(tmp_path: Path) -> None:
    async with handling(min_workers=2, max_workers=2) as (client, registry):
        with pytest.raises(AdapterFailed, match="not in this worker"):
            await registry.register(order(tmp_path, switch="one_refuses", pid=str(client.pids[1])))
        assert await known(client, 2) == [(), ()]


async def test_where_one_worker_refuses_to_let_an_adapter_go_all_workers_keep_it(tmp_path: Path) -> None:
    async with handling(min_workers=2, max_workers=2) as (client, registry):
        await registry.register(order(tmp_path, k="v", stays_in=str(client.pids[1])))
        with pytest.raises(AdapterFailed, match="this worker keeps it"):
            await registry.unregister("a")
        assert "a" in registry
        assert await known(client, 2) == [("a",), ("a",)]
        assert {(await ask(client, "a"))["adapter"]["k"] for _ in range(4)} == {"v"}


async def test_a_worker_that_is_started_again_is_told_of_all_adapters(tmp_path: Path) -> None:
    async with handling() as (client, registry):
        await registry.register(order(tmp_path, "a"))
        await registry.register(order(tmp_path, "b"))
        before = client.pids
        await client.ask("x", query={"exit": "1"})
        await until(lambda: client.pids and client.pids != before)
        assert await known(client, 1) == [("a", "b")]


async def test_a_call_for_an_unknown_adapter_does_not_reach_the_handler(tmp_path: Path) -> None:
    async with handling() as (client, _):
        for more in (
            {"query": {"adapter": "nope"}},
            {"body": "adapter=nope", "content_type": "application/x-www-form-urlencoded"},
        ):
            with pytest.raises(ContractError, match="nope") as caught:
                await client.send(**more)  # type: ignore[arg-type]
            assert caught.value.reply.status == 424
        assert (await ask(client))["adapter"] is None
        client.handler.adapters = None
        assert (await ask(client, "nope"))["adapter"] is None


async def test_a_registration_that_takes_too_long_fails_and_is_undone(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with handling(predict_timeout=60.0) as (client, registry):
        (worker,) = client.handler.pool.workers
        registration = asyncio.create_task(registry.register(order(tmp_path, switch="held", until=str(mark))))
        await until(lambda: worker.calls == 1)
        await pass_time(61)
        await until(lambda: worker.calls == 2)  # This call undoes the registration.
        mark.touch()
        with pytest.raises(AdapterFailed, match="register_adapter"):
            await registration
        assert registry.all() == ()
        assert await known(client, 1) == [()]


async def test_an_adapter_in_the_place_of_another_is_the_only_one_that_a_new_worker_hears_of(tmp_path: Path) -> None:
    async with handling() as (client, registry):
        await registry.register(order(tmp_path, k="old"))
        await registry.register(order(tmp_path, k="new"), replacing=True)
        await exit_and_restart(client)
        assert (await ask(client, "a"))["adapter"]["k"] == "new"
        await registry.unregister("a")
        await exit_and_restart(client)
        assert await known(client, 1) == [()]


async def test_an_adapter_that_cannot_take_the_place_of_another_leaves_it_there(tmp_path: Path) -> None:
    async with handling() as (client, registry):
        await registry.register(order(tmp_path, k="old"))
        with pytest.raises(AdapterFailed, match="this adapter is broken"):
            await registry.register(order(tmp_path, switch="error"), replacing=True)
        assert (await ask(client, "a"))["adapter"]["k"] == "old"


async def test_a_worker_that_ends_as_it_lets_an_adapter_go_does_not_keep_it_registered(tmp_path: Path) -> None:
    async with handling(min_workers=2, max_workers=2) as (client, registry):
        pids = client.pids
        await registry.register(order(tmp_path, kills=str(pids[0])))
        await registry.unregister("a")
        await until(lambda: len(client.pids) == 2 and pids[0] not in client.pids)
        assert await known(client, 2) == [(), ()]


async def test_a_worker_that_starts_while_an_adapter_is_removed_does_not_keep_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with handling(min_workers=2, max_workers=2) as (client, registry):
        await registry.register(order(tmp_path, leaves_with=str(mark)))
        pool = client.handler.pool
        os.kill(client.pids[1], signal.SIGKILL)
        await until(lambda: pool.ready == 1)
        removal = asyncio.create_task(registry.unregister("a"))
        await until(lambda: pool.ready == 2)
        mark.touch()
        await removal
        await until(lambda: len(pool.serving) == 2)
        assert await known(client, 2) == [(), ()]


@pytest.mark.parametrize("leaving", [False, True])
async def test_a_worker_that_ends_while_it_waits_for_another_change_of_adapters_is_replaced(
    tmp_path: Path, leaving: bool
) -> None:
    mark = tmp_path / "mark"
    async with handling() as (client, registry):
        pool = client.handler.pool
        if leaving:
            await registry.register(order(tmp_path, leaves_with=str(mark)))
            change = asyncio.create_task(registry.unregister("a"))
        else:
            change = asyncio.create_task(registry.register(order(tmp_path, switch="held", until=str(mark))))
        await until(lambda: pool.workers[0].calls == 1 + leaving)
        pool.scale(2, 2)
        await until(lambda: pool.ready == 2)  # The second worker waits for the end of the change.
        os.kill(client.pids[1], signal.SIGKILL)
        await until(lambda: pool.ready == 1)
        mark.touch()
        await change
        async with asyncio.timeout(60):
            await until(lambda: len(pool.serving) == 2)
            assert await known(client, 2) == [() if leaving else ("a",)] * 2
        assert pool.failures == 1


async def test_a_worker_that_is_told_of_adapters_ends_with_the_model(tmp_path: Path) -> None:
    mark = tmp_path / "told"
    async with handling() as (client, registry):
        await registry.register(order(tmp_path, switch="slow_again", seconds="60", mark=str(mark)))
        before = client.pids
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: not mark.exists())  # The next worker is registering the adapter.
        (pid,) = client.pids
        assert pid not in before
        assert psutil.pid_exists(pid)
    await until(lambda: not psutil.pid_exists(pid))


async def test_a_registration_that_hangs_does_not_hold_up_the_end_of_the_model(tmp_path: Path) -> None:
    async with handling(grace=0.2) as (client, registry):
        slow = asyncio.create_task(registry.register(order(tmp_path, switch="slow", seconds="3600")))
        await until(lambda: client.handler.pool.workers[0].calls == 1)
        async with asyncio.timeout(60):
            await registry.stop()
        await asyncio.wait({slow})
        assert slow.cancelled()
        assert registry.all() == ()


async def exit_and_restart(client: Client) -> None:
    before = client.pids
    await client.ask("x", query={"exit": "1"})
    await until(lambda: client.pids and client.pids != before)
