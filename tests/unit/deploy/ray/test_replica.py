"""A replica's health."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed")

from ray import serve

from deploy.ray.adapter_changes import AdapterChange, ChangeLog, Follower
from deploy.ray.replica import Replica
from tests.waiting import until


class WithoutServer(Replica):  # type: ignore[misc]
    """Has no server to stop at its end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


LOAD = AdapterChange("POST", b"/adapters?name=a&src=/a", (), b"", "main")


@pytest.mark.asyncio
async def test_a_replica_is_healthy_while_it_loads_an_adapter_and_catches_up_without_being_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, calls, ping = asyncio.Event(), list[str](), 200

    async def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        if request.url.path == "/ping":
            return httpx.Response(ping, text="how it is")
        await held.wait()
        return httpx.Response(200)

    async def log(known: ChangeLog) -> ChangeLog:
        return ChangeLog(1, (LOAD,))

    actor = SimpleNamespace(log=SimpleNamespace(remote=log))
    monkeypatch.setattr(serve, "get_deployment_actor", lambda _: actor)
    replica: Any = object.__new__(WithoutServer)
    replica._own = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://replica")
    replica._follower, replica._catching_up = Follower(replica._own, "one", {}), None
    async with asyncio.timeout(60):
        for _ in range(3):
            await replica.check_health()
            await until(lambda: "/adapters" in calls)
        ping = 500
        with pytest.raises(RuntimeError, match="/ping is 500: how it is"):
            await replica.check_health()
        ping = 200
        held.set()
        await replica._catching_up
        assert calls.count("/adapters") == 1
        assert replica._follower.log.changes == (LOAD,)
        monkeypatch.setattr(serve, "get_deployment_actor", lambda _: (_ for _ in ()).throw(ValueError("no actor")))
        await replica.check_health()
        await replica._catching_up
