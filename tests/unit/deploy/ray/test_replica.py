"""A replica's health, and the metrics of several replicas in one text."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("ray.serve", reason="Ray is not installed")

from ray import serve

from deploy.ray.adapter_changes import Change, Follower, Log
from deploy.ray.replica import Replica, merged_metrics
from tests.waiting import until

ONE = """# HELP slipway_requests_total HTTP requests served.
# TYPE slipway_requests_total counter
slipway_requests_total{route="/a",status="200"} 1.0
# HELP slipway_ready 1 when the model can serve.
# TYPE slipway_ready gauge
slipway_ready 1.0
# HELP nv_inference_count Prompts.
# TYPE nv_inference_count untyped
nv_inference_count 3.0
"""


def test_each_series_has_its_replica_and_each_metric_one_head() -> None:
    text = merged_metrics({"a": ONE, "b": ONE.replace("ready 1.0", "ready 0.0")}).decode()
    assert text.splitlines()[:4] == [
        "# HELP slipway_requests_total HTTP requests served.",
        "# TYPE slipway_requests_total counter",
        'slipway_requests_total{replica="a",route="/a",status="200"} 1.0',
        'slipway_requests_total{replica="b",route="/a",status="200"} 1.0',
    ]
    ready = next(m for m in text_string_to_metric_families(text) if m.name == "slipway_ready")
    assert [(sample.labels, sample.value) for sample in ready.samples] == [({"replica": "a"}, 1), ({"replica": "b"}, 0)]
    assert '\nnv_inference_count{replica="a"} 3.0\n' in text


class WithoutServer(Replica):  # type: ignore[misc]
    """Has nothing to stop when it goes."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


LOAD = Change("POST", b"/adapters?name=a&src=/a", (), b"", "main")


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

    async def log(known: Log) -> Log:
        return Log(1, (LOAD,))

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
