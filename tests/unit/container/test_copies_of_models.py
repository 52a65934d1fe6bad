"""The copies of a model in the management API, in /ping and in the metrics."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from container.models.life_cycle import Lifecycle
from engines.interface import CopyState
from tests.stand_ins.copied_engine import CopiedEngine
from tests.unit.container.management import error
from tests.unit.container.one_model import make, with_engine


def serving(engine: CopiedEngine, **settings: Any) -> tuple[Lifecycle, httpx.AsyncClient]:
    lifecycle, client = make(**settings)
    lifecycle.config = replace(lifecycle.config, max_copies=None, min_copies=None)
    with_engine(lifecycle, engine)
    return lifecycle, client


async def scale(client: httpx.AsyncClient, query: str) -> httpx.Response:
    return await client.put(f"/models/model?{query}")


async def described(client: httpx.AsyncClient) -> dict[str, Any]:
    (workflow,) = (await client.get("/models/model")).json()
    (model,) = workflow["models"]
    found: dict[str, Any] = model
    return found


def limits(model: dict[str, Any]) -> list[tuple[int, int]]:
    return [(group["minWorkers"], group["maxWorkers"]) for group in model["workerGroups"]]


async def test_copies_are_workers_in_a_group_for_the_first_gpu_of_each() -> None:
    engine = CopiedEngine(4)
    lifecycle, client = serving(engine)
    lifecycle.config = replace(lifecycle.config, min_copies=2)
    engine.states |= {2: CopyState.DRAINING, 3: CopyState.DEAD, 4: CopyState.STARTING}
    model = await described(client)
    groups = model["workerGroups"]
    assert [group["device"] for group in groups] == [{"deviceType": "gpu", "deviceId": gpu} for gpu in (0, 2, 4, 6)]
    workers = [[(worker["id"], worker["status"]) for worker in group["workers"]] for group in groups]
    assert workers == [[(1, "READY")], [(2, "UNLOADING")], [(3, "UNLOADING")], []]
    assert limits(model) == [(1, 1), (0, 0), (1, 1), (0, 1)], "the sums are those of the model"
    assert model["status"] == "Unhealthy"


async def test_a_copy_has_its_own_start_time() -> None:
    engine = CopiedEngine(1)
    _, client = serving(engine)
    (group,) = (await described(client))["workerGroups"]
    registered = group["workers"][0]["startTime"]
    engine.started_at = 4e9  # It was restarted.
    (group,) = (await described(client))["workerGroups"]
    assert group["workers"] == [{"id": 1, "startTime": "2096-10-02T07:06:40.000Z", "status": "READY"}]
    assert registered < "2096"


@pytest.mark.parametrize(
    ("query", "now", "least", "copies"),
    [
        ("min_worker=1&max_worker=4", (1, 4), 1, 4),
        ("max_worker=1", (1, 1), 1, 1),
        ("min_worker=4", (4, 4), 4, 4),
        ("min_worker=0&max_worker=2", (1, 2), 1, 2),
    ],
)
async def test_copies_are_added_and_removed(query: str, now: tuple[int, int], least: int, copies: int) -> None:
    engine = CopiedEngine(2)
    lifecycle, client = serving(engine)
    places = lifecycle.view().max_requests
    answer = await scale(client, query)
    text = f'Workflow "model" worker scaled. New Worker configuration min workers:{now[0]} max workers:{now[1]}'
    assert (answer.status_code, answer.json()) == (200, {"status": text})
    assert (engine.least, len(engine.copies)) == (least, copies)
    assert lifecycle.copy_limits == now
    assert lifecycle.view().max_requests == places + 2 * (copies - 2), "the queue has the places of all copies"
    assert (lifecycle.settings.config.min_copies, lifecycle.settings.config.max_copies) == now, "for a later load"
    sums = [sum(numbers) for numbers in zip(*limits(await described(client)), strict=True)]
    assert tuple(sums) == now


async def test_too_many_copies_are_refused_with_the_field_and_the_largest_number() -> None:
    engine = CopiedEngine(2)
    lifecycle, client = serving(engine)
    for query, field in (("min_worker=9", "min_worker"), ("min_worker=1&max_worker=9", "max_worker")):
        code, kind, message = error(await scale(client, query))
        assert (code, kind) == (400, "BadRequestException")
        assert re.fullmatch(rf"Parameter {field} is 9; .* 4 copies", message)
    assert (lifecycle.copy_limits, engine.least) == ((2, 2), 2)


async def test_a_model_that_is_scaled_to_zero_keeps_its_copies_and_comes_back() -> None:
    engine = CopiedEngine(2)
    _, client = serving(engine)
    assert (await scale(client, "max_worker=0")).json()["status"].endswith("min workers:0 max workers:0")
    assert error(await client.post("/invocations", json={"inputs": "x"}))[:2] == (503, "WlmShutdownException")
    assert len(engine.copies) == 2
    assert (await client.get("/ping")).status_code == 200
    model = await described(client)
    assert (limits(model), model["workerGroups"][0]["workers"]) == ([(0, 0)], [])
    assert error(await scale(client, "min_worker=9"))[0] == 400
    assert error(await client.post("/invocations", json={"inputs": "x"}))[:2] == (503, "WlmShutdownException")
    assert (await scale(client, "min_worker=1&max_worker=2")).json()["status"].endswith("min workers:1 max workers:2")
    assert limits(await described(client)) == [(1, 1), (0, 1)]


async def test_copies_are_not_scaled_while_all_are_dead() -> None:
    engine = CopiedEngine(2)
    _, client = serving(engine)
    engine.die(1, 2)
    assert error(await scale(client, "max_worker=1"))[:2] == (503, "ServiceUnavailableException")
    assert (await described(client))["workerGroups"][0]["workers"] == []


@pytest.mark.parametrize(("settings", "code"), [({}, 200), ({"workers_health_check": True}, 500)])
async def test_too_few_copies_are_unhealthy_as_in_lmi(settings: dict[str, bool], code: int) -> None:
    engine = CopiedEngine(3)
    lifecycle, client = serving(engine, **settings)
    for least, status in ((2, "Healthy"), (3, "Unhealthy")):
        lifecycle.config = replace(lifecycle.config, min_copies=least)
        engine.die(3)
        answer = await client.get("/ping")
        assert (answer.status_code, answer.json()["model"]["status"]) == (200 if status == "Healthy" else code, status)
        assert (await described(client))["status"] == status


async def test_the_metrics_count_copies_by_their_state_and_a_server_with_lost_copies_is_not_ready() -> None:
    engine = CopiedEngine(4)
    _, client = serving(engine)
    engine.die(3)
    engine.states[4] = CopyState.STARTING
    for ready in (1.0, 0.0):
        lines = (await client.get("/metrics")).text.splitlines()
        for state, count in (("starting", 1), ("ready", 2), ("draining", 0), ("dead", 1)):
            assert f'slipway_engine_copies{{state="{state}"}} {count}.0' in lines
        assert f"slipway_ready {ready}" in lines
        assert "slipway_engine_stalled 0.0" in lines
        engine.give_up()


async def test_a_server_with_lost_copies_says_why() -> None:
    engine = CopiedEngine(3)
    lifecycle, client = serving(engine)
    engine.die(1)
    engine.give_up()
    answer = await client.get("/ping")
    assert answer.status_code == 500
    assert answer.json() == {"model": {"status": "Unhealthy", "reason": "2 of 3 copies serve"}}
    assert (lifecycle.view().state, lifecycle.view().reason) == ("ready", "2 of 3 copies serve"), "calls are answered"
