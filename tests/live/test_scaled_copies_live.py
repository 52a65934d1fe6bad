"""Copies of a model that are added, removed, stalled or lost, with the real vLLM on one CPU."""

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
from tests.live.server import Server, hosted, serving, stopped, write_model
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with two copies, which may be scaled down to one. The last test with this server stops it."""
    environment = {"SERVING_MIN_WORKERS": "1", "SERVING_MAX_WORKERS": "2", "SERVING_ENGINE_RESTART": "3"}
    environment["SERVING_STALL_TIMEOUT"] = "15"
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
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32, "ignore_eos_token": True}}
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
    copies(two)[1].kill()
    pings = set()

    def is_back() -> bool:
        pings.add(two.ping())
        return two.metric("slipway_engine_restarts_total") == restarts + 1 and ready(two) == [1, 2]

    wait_until(is_back)
    assert pings == {200}
    assert two.metric('slipway_engine_copies{state="ready"}') == 2
    call(two)


def copies(server: Server) -> list[psutil.Process]:
    """Return the engine processes in the order in which they were started."""
    return sorted(server.engine_processes(), key=lambda process: process.create_time())


def hold(
    server: Server, pool: ThreadPoolExecutor, calls: int
) -> tuple[list[psutil.Process], list[Future[httpx.Response]]]:
    """Pause the copies, and send calls to them. Return the copies and the calls."""
    before = server.metric("slipway_generations_total")
    paused = copies(server)
    for copy in paused:
        copy.suspend()
    body = {"model": "model", "prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}
    running = [pool.submit(server.client.post, "/v1/completions", json=body) for _ in range(calls)]
    wait_until(lambda: server.metric("slipway_generations_total") == before + calls)
    return paused, running


def test_a_call_at_two_deaths_gets_its_error_if_no_copy_is_started(two: Server) -> None:
    restarts = two.metric("slipway_engine_restarts_total")
    with ThreadPoolExecutor(2) as pool:
        (first, second), calls = hold(two, pool, 2)
        first.kill()
        wait_until(lambda: two.metric("slipway_engine_restarts_total") > restarts and ready(two) == [1, 2])
        scale(two, "min_worker=1&max_worker=1")
        second.kill()
        answers = [call.result() for call in calls]
    assert sorted(answer.status_code for answer in answers) == [200, 500]
    (error,) = [answer.json()["error"]["message"] for answer in answers if answer.status_code == 500]
    assert error == EngineDead().message


def test_the_calls_of_a_copy_that_stalls_while_it_drains_continue_in_another(two: Server) -> None:
    for most in (1, 2):  # Afterwards, the second process is copy 2.
        assert scale(two, f"min_worker={most}&max_worker={most}")[0] == 200
        wait_until(lambda most=most: len(ready(two)) == len(two.engine_processes()) == most)
    with ThreadPoolExecutor(2) as pool:
        (first, second), calls = hold(two, pool, 2)
        scale(two, "min_worker=1&max_worker=1")
        first.resume()
        assert [call.result().status_code for call in calls] == [200, 200]
    wait_until(lambda: not second.is_running())


def test_a_copy_that_loads_ends_with_its_model(host: Server, tmp_path: Path, small_options: dict[str, object]) -> None:
    model_dir = write_model(tmp_path / "model", **small_options)
    with (model_dir / "serving.properties").open("a") as file:
        file.write("minWorkers=1\nmaxWorkers=2\n")
    with hosted(host, model_dir) as server:
        wait_until(lambda: len(server.engine_processes()) == 2)
        loading = copies(server)[1]
        loading.suspend()  # So the load does not end by itself.
        assert host.client.delete(f"/models/{server.name}").status_code == 200
        assert not loading.is_running()
        assert " ERROR " not in server.log_text()


def test_a_server_that_stops_while_a_copy_loads_ends_without_an_error(two: Server) -> None:
    assert scale(two, "min_worker=1&max_worker=1")[0] == 200
    wait_until(lambda: len(two.engine_processes()) == 1)
    logged = len(two.log_text())
    assert scale(two, "min_worker=1&max_worker=2")[0] == 200
    wait_until(lambda: len(two.engine_processes()) == 2)
    assert two.stop() == 0
    log = two.log_text()[logged:]
    assert " ERROR " not in log
    assert " vllm." not in log.partition("container.server: drained")[2], "the processes of the copy have ended first"


@pytest.fixture(scope="module")
def not_restarted(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with two copies. A copy that dies is given up."""
    environment = {"SERVING_MAX_WORKERS": "2", "SERVING_ENGINE_RESTART": "0", "SERVING_STALL_TIMEOUT": "15"}
    with serving(tmp_path_factory.mktemp("not-restarted"), environment, **small_options) as server:
        yield server


def test_a_stalled_copy_gets_no_new_calls_while_the_other_works(not_restarted: Server) -> None:
    prompts = [f"{name} prompt that a cache has. " * 50 for name in ("A", "Another")]
    bodies = [{"prompt": prompt, "max_tokens": 1, "temperature": 0} for prompt in prompts]

    def choices(body: dict[str, Any]) -> Any:
        return not_restarted.client.post("/v1/completions", json=body).json()["choices"]

    def chosen() -> set[int]:
        found = (not_restarted.explain("/v1/completions", body)["prompts"][0]["copy"] for body in bodies)
        return set(found)

    before = [choices(body) for body in bodies]
    assert chosen() == {1, 2}
    with ThreadPoolExecutor(2) as pool:
        with stopped(copies(not_restarted)[0].pid):
            waiting = [pool.submit(choices, body) for body in bodies]  # One of these calls stalls its copy.
            wait_until(lambda: not_restarted.ping() == 500)
            assert len(chosen()) == 1
            assert [choices(body) for body in bodies] == before
        assert [answered.result() for answered in waiting] == before
    wait_until(lambda: not_restarted.ping() == 200)
    assert chosen() == {1, 2}


def test_a_copy_that_was_given_up_is_started_by_the_same_numbers(not_restarted: Server) -> None:
    copies(not_restarted)[1].kill()
    wait_until(lambda: not_restarted.ping() == 500)
    assert scale(not_restarted, "min_worker=2&max_worker=2")[0] == 200
    wait_until(lambda: ready(not_restarted) == [1, 2])
    assert not_restarted.ping() == 200
    call(not_restarted)


def test_a_copy_that_drains_does_not_count_as_left(not_restarted: Server) -> None:
    server = not_restarted
    with ThreadPoolExecutor(2) as pool:
        (first, second), calls = hold(server, pool, 2)
        scale(server, "min_worker=1&max_worker=1")
        first.kill()
        wait_until(lambda: "0 of 2 copies are left" in server.client.get("/ping").text)
        assert server.ping() == 500
        assert server.metric('slipway_engine_copies{state="draining"}') == 1
        second.resume()
        assert sorted(call.result().status_code for call in calls) == [200, 500]
