"""Copies of a model on one CPU, with the real vLLM. The management API adds, removes and lists the copies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest

from engines.errors import EngineDead
from tests.live.server import Server, serving
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with two copies, which may be scaled down to one."""
    environment = {"SERVING_MIN_WORKERS": "1", "SERVING_MAX_WORKERS": "2", "SERVING_ENGINE_RESTART": "3"}
    with serving(tmp_path_factory.mktemp("copies"), environment, **small_options) as server:
        wait_until(lambda: ready(server) == [1, 2])
        yield server


def group(server: Server) -> dict[str, Any]:
    (workflow,) = server.client.get(f"/models/{server.name}").json()
    (found,) = workflow["models"][0]["workerGroups"]
    assert found["device"] == {"deviceType": "cpu", "deviceId": -1}
    result: dict[str, Any] = found
    return result


def ready(server: Server) -> list[int]:
    """Return the numbers of the copies that serve."""
    return [worker["id"] for worker in group(server)["workers"] if worker["status"] == "READY"]


def scale(server: Server, query: str) -> tuple[int, str]:
    answer = server.client.put(f"/models/{server.name}?{query}")
    document = answer.json()
    return answer.status_code, document.get("status") or document["message"]


def call(server: Server) -> None:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 100, "ignore_eos_token": True}}
    answer = server.client.post("/invocations", json=body)
    assert answer.status_code == 200, answer.text


def call_until(server: Server, stop: Event) -> None:
    """Send one call after the other."""
    while not stop.is_set():
        call(server)


def test_copies_are_removed_while_calls_run_and_added_again(two: Server) -> None:
    stop = Event()
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(call_until, two, stop) for _ in range(4)]
        try:
            wait_until(lambda: two.metric("slipway_engine_running") >= 2)
            code, text = scale(two, "max_worker=1")
            assert code == 200
            assert text.endswith("min workers:1 max workers:1")
            wait_until(lambda: len(two.engine_processes()) == 1)
        finally:
            stop.set()
        for client in clients:
            client.result()  # No call was lost.
    assert (len(ready(two)), two.ping()) == (1, 200)
    assert scale(two, "min_worker=2&max_worker=2")[0] == 200
    wait_until(lambda: ready(two) == [1, 2])
    call(two)
    assert (group(two)["minWorkers"], group(two)["maxWorkers"]) == (2, 2)


def test_a_copy_that_is_killed_comes_back_and_ping_stays_200(two: Server) -> None:
    restarts = two.metric("slipway_engine_restarts_total")
    victim = two.engine_processes()[0]
    victim.kill()
    pings = set()

    def is_back() -> bool:
        pings.add(two.ping())
        return two.metric("slipway_engine_restarts_total") == restarts + 1 and ready(two) == [1, 2]

    wait_until(is_back)
    assert pings == {200}
    assert two.metric('slipway_engine_copies{state="ready"}') == 2
    call(two)


def hold(
    server: Server, pool: ThreadPoolExecutor, calls: int
) -> tuple[list[psutil.Process], list[Future[httpx.Response]]]:
    """Pause the copies, and send calls to them.

    Return the copies in the order in which they were started, and the calls.
    """
    before = server.metric("slipway_generations_total")
    copies = sorted(server.engine_processes(), key=lambda process: process.create_time())
    for copy in copies:
        copy.suspend()
    body = {"model": "model", "prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}
    running = [pool.submit(server.client.post, "/v1/completions", json=body) for _ in range(calls)]
    wait_until(lambda: server.metric("slipway_generations_total") == before + calls)
    return copies, running


def test_a_copy_that_drains_does_not_count_as_left(tmp_path: Path, small_options: dict[str, object]) -> None:
    environment = {"SERVING_MAX_WORKERS": "2", "SERVING_ENGINE_RESTART": "0"}
    with serving(tmp_path, environment, **small_options) as server, ThreadPoolExecutor(2) as pool:
        (first, second), calls = hold(server, pool, 2)
        scale(server, "min_worker=1&max_worker=1")
        first.kill()
        wait_until(lambda: server.ping() == 500)
        assert server.metric('slipway_engine_copies{state="draining"}') == 1
        second.resume()
        assert sorted(call.result().status_code for call in calls) == [200, 500]


def test_a_call_at_two_deaths_gets_its_error_if_no_copy_is_started(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    environment = {"SERVING_MAX_WORKERS": "2", "SERVING_ENGINE_RESTART": "3"}
    with serving(tmp_path, environment, **small_options) as server, ThreadPoolExecutor(2) as pool:
        (first, second), calls = hold(server, pool, 2)
        first.kill()
        wait_until(lambda: server.metric("slipway_engine_restarts_total") == 1 and ready(server) == [1, 2])
        scale(server, "min_worker=1&max_worker=1")
        second.kill()
        answers = [call.result() for call in calls]
        assert sorted(answer.status_code for answer in answers) == [200, 500]
        (error,) = [answer.json()["error"]["message"] for answer in answers if answer.status_code == 500]
        assert error == EngineDead().message


def test_a_copy_that_was_given_up_is_started_by_the_same_numbers(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    environment = {"SERVING_MAX_WORKERS": "2", "SERVING_ENGINE_RESTART": "0"}
    with serving(tmp_path, environment, **small_options) as server:
        server.engine_processes()[0].kill()
        wait_until(lambda: server.ping() == 500)
        assert scale(server, "min_worker=2&max_worker=2")[0] == 200
        wait_until(lambda: ready(server) == [1, 2])
        assert server.ping() == 200
        call(server)
