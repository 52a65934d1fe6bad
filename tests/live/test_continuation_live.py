"""Calls that run when the engine dies: their clients get the answers that they would have got."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.live.continued_calls import CASES, answer, kill
from tests.live.lora import make_adapter
from tests.live.server import Server, serving
from tests.live.small_model import ENDLESS, ENDLESS_STREAM
from tests.waiting import wait_until

WAITING = "the engine has died; calls wait for it"
DEAD = "the engine has died; the request was not completed"
VLLMS_WAY = {"return_token_ids": True}  # A field that leaves the call to vLLM's front end.
# Calls that are not continued.
LOST: dict[str, dict[str, Any]] = {
    "presence_penalty and frequency_penalty count the tokens of the answer alone": {"presence_penalty": 0.5},
    "the place in the random numbers of its seed is lost": {"seed": 3, "temperature": 1.0},
    "bad_words of several tokens are looked for in the answer alone": {"bad_words": ["one of the many"]},
}


@pytest.fixture(scope="module")
def restarting(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server whose engine may be killed many times."""
    directory = tmp_path_factory.mktemp("restarting")
    make_adapter(directory / "model" / "adapters" / "red", Path(str(small_options["model_id"])), 1)
    environment = {"SERVING_ENGINE_RESTART": "1000", "SERVING_JOB_QUEUE_SIZE": "100"}
    with serving(directory, environment, enable_lora="true", **small_options) as server:
        yield server


def test_each_client_gets_the_answer_that_it_would_have_got(restarting: Server) -> None:
    with ThreadPoolExecutor(len(CASES)) as pool:
        undisturbed = dict(zip(CASES, pool.map(lambda case: answer(restarting, case), CASES.values()), strict=True))
    before = restarting.metric("slipway_continued_calls_total")
    with ThreadPoolExecutor(len(CASES) + 2) as pool:
        calls = {name: pool.submit(answer, restarting, case) for name, case in CASES.items()}
        kill(restarting, 8)
        new = pool.submit(answer, restarting, CASES["LMI"])
        pings = pool.submit(lambda: [restarting.ping() for _ in iter(lambda: new.done(), True)])
        assert new.result() == undisturbed["LMI"]
        assert set(pings.result()) <= {200}
        assert {name: call.result() for name, call in calls.items()} == undisturbed
    assert restarting.metric("slipway_continued_calls_total") - before > 4
    assert restarting.metric("slipway_engine_down_seconds_total") > 0
    restarting.wait_for_log(WAITING)


def test_a_stop_string_ends_a_continued_answer(restarting: Server) -> None:
    def text(**given: Any) -> dict[str, Any]:
        body = {"model": "model", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "prompt": "Twice"}
        choice: dict[str, Any] = restarting.client.post("/v1/completions", json=body | given).json()["choices"][0]
        return choice

    stop = (whole := text()["text"])[-12:-4]
    expected = text(stop=stop)
    assert expected["finish_reason"] == "stop"
    assert len(expected["text"]) <= whole.index(stop)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(text, stop=stop)
        kill(restarting, 1)
        assert call.result() == expected


def test_a_call_whose_rest_may_depend_on_what_is_lost_gets_the_error(restarting: Server) -> None:
    bodies = [ENDLESS_STREAM | {"n": 1} | given | way for given in LOST.values() for way in ({}, VLLMS_WAY)]
    with ThreadPoolExecutor(len(bodies)) as pool, ExitStack() as streams:
        rests = []
        for body in bodies:
            stream = streams.enter_context(restarting.client.stream("POST", "/v1/completions", json=body))
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            rests.append(pool.submit(list, filter(None, lines)))
        kill(restarting, len(bodies))
        for rest in rests:
            *_, last, done = rest.result()
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == DEAD
            assert done == "data: [DONE]"
    restarting.wait_for_log(": 0 requests are continued")
    for reason in LOST:
        restarting.wait_for_log(f"2 cannot be: {reason}")


def test_clients_may_leave_and_come_while_the_engine_is_started_again(restarting: Server) -> None:
    aborted = "slipway_generations_aborted_total"
    aborted_before = restarting.metric(aborted)
    leaving = [restarting.send("/invocations", {"inputs": "Once", "parameters": ENDLESS, "stream": True})]
    leaving.append(restarting.send("/v1/completions", ENDLESS_STREAM | VLLMS_WAY))
    deaths = restarting.log_text().count(WAITING)
    kill(restarting, 4)
    wait_until(lambda: restarting.log_text().count(WAITING) > deaths)
    for connection in leaving:
        connection.close()
    restarting.wait_for_metric(aborted, aborted_before + 2)
    assert restarting.invoke("Once", max_new_tokens=3).status_code == 200
    restarting.wait_for_metric("slipway_engine_running", 0)
    restarting.wait_for_metric("slipway_open_requests", 0)


def test_a_call_that_gets_no_engine_in_time_gets_an_error(tmp_path: Path, small_options: dict[str, object]) -> None:
    environment = {"SERVING_ENGINE_RESTART": "1"}
    with serving(tmp_path, environment, **small_options) as server, ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(server.client.post, "/v1/completions", json=ENDLESS_STREAM),
            pool.submit(server.invoke, "Once", **ENDLESS),
        ]
        kill(server, 4)
        server.wait_for_metric("slipway_continued_calls_total", 2)
        kill(server, 4)
        stream, whole = (call.result() for call in calls)
        *_, last, _ = stream.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == DEAD
        assert (whole.status_code, whole.json()["error"]) == (500, DEAD)
        assert server.ping() == 500
