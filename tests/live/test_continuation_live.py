"""Calls that run when the engine dies: their clients get the same answers as if it had not died."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.live.chromium import MISSING, PROGRAM, chromium
from tests.live.continued_calls import (
    CASES,
    FEW,
    OPTIONS,
    PLAIN,
    Case,
    add_adapters,
    answer,
    answers,
    cases,
    kill,
    signal_engines,
    step_until_running,
)
from tests.live.deadly_prompts import IS_KILLED, RAISES
from tests.live.lora import make_adapter
from tests.live.partly_held import NOT_HELD, PLACE, A, assert_judged, tags, verdicts
from tests.live.server import START_SECONDS, Server, serving, stopped
from tests.live.small_model import ENDLESS, ENDLESS_STREAM
from tests.live.small_pooling_models import prepare_small_encoder
from tests.waiting import wait_until

WAITING = "the engine has died; calls wait for it"
DEAD = "the engine has died; the request was not completed"
VLLMS_WAY = {"return_token_ids": True}  # Because of this field, vLLM's front end answers the call.
# Calls that are not continued.
LOST: dict[str, dict[str, Any]] = {
    "presence_penalty and frequency_penalty count the tokens of the answer alone": {"presence_penalty": 0.5},
    "the place in the random numbers of its seed is lost": {"seed": 3, "temperature": 1.0},
    "bad_words of several tokens are looked for in the answer alone": {"bad_words": ["one of the many"]},
    "repetition_detection looks at the answer alone": {
        "repetition_detection": {"max_pattern_size": 2, "min_count": 1000}
    },
}


SHOWN = "document.querySelector('#view-server').textContent.includes('{}')"


@pytest.fixture
def restarting(tmp_path: Path, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server for one test, because the pause before a restart doubles each time."""
    add_adapters(tmp_path / "model", Path(str(small_options["model_id"])))
    environment = {"SERVING_ENGINE_RESTART": "3", "SERVING_JOB_QUEUE_SIZE": "100"}
    with serving(tmp_path, environment, **OPTIONS, **small_options) as server:
        yield server


@pytest.mark.slow
def test_each_client_gets_the_answer_that_it_would_have_got(restarting: Server) -> None:
    undisturbed = answers(restarting, CASES)
    pings = []
    with ThreadPoolExecutor(1) as pool:

        def disturb() -> None:
            kill(restarting, 8)
            new = pool.submit(answer, restarting, CASES["LMI"])
            while not wait([new], timeout=0.1).done:
                pings.append(restarting.ping())
            assert new.result() == undisturbed["LMI"]

        assert answers(restarting, CASES, disturb) == undisturbed
    assert set(pings) == {200}
    assert restarting.metric("slipway_continued_calls_total") > 4
    assert restarting.metric("slipway_engine_down_seconds_total") > 0
    restarting.wait_for_log(WAITING)


@pytest.mark.slow
def test_a_stop_string_ends_a_continued_answer(restarting: Server) -> None:
    def text(**given: Any) -> dict[str, Any]:
        body = {"model": "model", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "prompt": "Twice"}
        choice: dict[str, Any] = restarting.client.post("/v1/completions", json=body | given).json()["choices"][0]
        return choice

    stop = (whole := text()["text"])[-12:-4]
    expected = text(stop=stop)
    assert expected["finish_reason"] == "stop"
    assert len(expected["text"]) <= whole.index(stop)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(text, stop=stop)
        kill(restarting, 1, by=signal.SIGTERM)  # vLLM's process aborts its sequences.
        assert call.result() == expected


@pytest.mark.slow
def test_a_continued_answer_is_checked_against_its_schema(restarting: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": tags(items=A, minItems=150, maxItems=150)}}
    body = {"prompt": "Once", "max_tokens": 2000, "response_format": form}
    before = verdicts(restarting)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(restarting.client.post, "/v1/completions", json=body | way) for way in ({}, VLLMS_WAY)]
        kill(restarting, 2)
        replies = [call.result() for call in calls]
    for reply in replies:
        assert json.loads(reply.json()["choices"][0]["text"]) == {"tags": ["a"] * 150}
        assert reply.headers[NOT_HELD] == PLACE
    assert_judged(restarting, before, invalid=2)


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_answer_continues_with_an_adapter_whose_files_have_changed(
    restarting: Server, small_options: dict[str, object], tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "mine", small_options["model_id"], 1)
    other = make_adapter(tmp_path / "other", small_options["model_id"], 2)
    assert restarting.client.post("/adapters", params={"name": "mine", "src": str(adapter)}).status_code == 200
    with restarting.client.stream("POST", "/v1/completions", json=ENDLESS_STREAM | {"model": "mine"}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        shutil.copyfile(other / "adapter_model.safetensors", adapter / "adapter_model.safetensors")
        kill(restarting, 1)
        *_, last, _done = filter(None, lines)
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == DEAD
    restarting.wait_for_log("1 cannot be: its adapter cannot be loaded again")
    asked = {"inputs": "Once", "adapters": "mine"}
    refused = restarting.client.post("/invocations", json=asked)
    assert (refused.status_code, "register it again" in refused.text) == (424, True)
    assert restarting.client.delete("/adapters/mine").status_code == 200
    assert restarting.client.post("/adapters", params={"name": "mine", "src": str(adapter)}).status_code == 200
    assert restarting.client.post("/invocations", json=asked).status_code == 200


@pytest.mark.slow
def test_clients_may_leave_and_come_while_the_engine_is_started_again(restarting: Server) -> None:
    leaving = [restarting.send("/invocations", {"inputs": "Once", "parameters": ENDLESS, "stream": True})]
    leaving.append(restarting.send("/v1/completions", ENDLESS_STREAM | VLLMS_WAY))
    kill(restarting, 4)
    restarting.wait_for_log(WAITING)
    for connection in leaving:
        connection.close()
    restarting.wait_for_metric("slipway_generations_aborted_total", 2)
    assert restarting.invoke("Once", max_new_tokens=3).status_code == 200
    restarting.wait_for_metric("slipway_engine_running", 0)
    restarting.wait_for_metric("slipway_open_requests", 0)


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_the_console_shows_the_restart_and_the_calls_that_continued(restarting: Server, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser, ThreadPoolExecutor(1) as pool:
        page = browser.new_page()
        page.open(f"{restarting.url}/console#server")
        page.wait_for("document.querySelector('#status')?.dataset.state === 'ready'")
        call = pool.submit(answer, restarting, CASES["LMI, stream"])
        old = restarting.engine_process()
        kill(restarting, 1)
        wait_until(lambda: engines(restarting) - {old})
        (new,) = engines(restarting) - {old}
        with stopped(new):  # The page polls only now and then.
            page.wait_for("document.querySelector('#status').dataset.state === 'restarting'")
            assert page.text("#status") == "model · restarting"
            assert page.text("#notice") == "The engine has died and is started again. Calls wait for it."
            page.wait_for(SHOWN.format("restarting (/ping: 200, RESTARTING)"))
        call.result()
        names = ("engine_restarts_total", "continued_calls_total", "engine_down_seconds_total")
        restarts, continued, seconds = (restarting.metric(f"slipway_{name}") for name in names)
        calls = f"{continued:.0f} calls continued, {seconds:.1f} s without an engine"
        row = f"{restarts:.0f} of 3 in 10 minutes; {calls}"
        page.wait_for(SHOWN.format(row))
        page.wait_for("document.querySelector('#status').dataset.state === 'ready'")
        assert page.text("#status").startswith("model · ready")
        assert not page.complaints


@pytest.mark.slow
def test_calls_that_kill_each_engine_get_the_error_alone_and_the_others_too_when_no_restart_is_left(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    """The engine dies twice while all calls run, and once for each deadly prompt that runs alone."""
    environment = {"SERVING_ENGINE_RESTART": "4"}
    worker = "tests.live.deadly_worker.DeadlyWorker"
    with serving(tmp_path, environment, worker_cls=worker, **small_options) as server, ThreadPoolExecutor(2) as pool:

        def disturb() -> None:
            step_until_running(server, len(calls) / 2)
            before = server.metric("slipway_generations_total")
            killers = []
            for prompt in (RAISES, IS_KILLED):  # Both arrive in one step.
                body = {"model": "model", "prompt": prompt, "max_tokens": 5}
                killers.append(pool.submit(server.client.post, "/v1/completions", json=body, timeout=START_SECONDS))
            wait_until(lambda: server.metric("slipway_generations_total") >= before + 2)
            signal_engines(server, signal.SIGCONT)
            for killer in killers:
                response = killer.result()
                assert (response.status_code, response.json()["error"]["message"]) == (500, DEAD)

        calls = {name: PLAIN[name] for name in FEW}
        undisturbed = answers(server, calls)
        assert answers(server, calls, disturb) == undisturbed
        assert server.metric("slipway_engine_restarts_total") == 4
        assert server.ping() == 200
        assert answer(server, PLAIN["chat"]) == undisturbed["chat"]

        late = [
            pool.submit(server.client.post, "/v1/completions", json=ENDLESS_STREAM),
            pool.submit(server.invoke, "Once", **ENDLESS),
        ]
        kill(server, 4)
        stream, whole = (call.result() for call in late)
        *_, last, _ = stream.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == DEAD
        assert (whole.status_code, whole.json()["error"]) == (500, DEAD)
        assert server.ping() == 500


@pytest.mark.slow
def test_calls_wait_through_several_deaths_and_restarts_leave_nothing(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    """The engine dies while the calls run, and then once while it starts."""
    names = ("LMI, stream", "completion", "completions, vLLM's way", "chat, stream", "LMI, beam search")
    calls = {name: PLAIN[name] for name in names}
    with serving(tmp_path, {"SERVING_ENGINE_RESTART": "3"}, **small_options) as server:
        process = psutil.Process(server.process.pid)

        def disturb() -> None:
            step_until_running(server, len(calls))
            killed: set[int] = set()
            for _ in range(2):
                wait_until(lambda: engines(server) - killed)
                (engine,) = engines(server) - killed
                killed.add(engine)
                os.kill(engine, signal.SIGKILL)

        undisturbed = answers(server, calls)
        threads, descriptors = process.num_threads(), process.num_fds()
        assert answers(server, calls, disturb) == undisturbed
        assert server.metric("slipway_engine_restarts_total") == 2
        kill(server, 0)
        server.wait_for_metric("slipway_engine_restarts_total", 3)
        assert answers(server, calls) == undisturbed
        # The event loop starts threads for functions as it needs them. A fault once left four threads and nine
        # descriptors at each restart.
        assert process.num_threads() < threads + 5
        assert process.num_fds() < descriptors + 5
        shared = [file.name for file in Path("/dev/shm").glob(f"*{sockets(process).name}-*")]
        assert shared
        assert [name for name in shared if f"-{server.engine_process()}-" not in name] == []


def engines(server: Server) -> set[int]:
    """Return the ids of the engine processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {process.pid for process in server.engine_processes()}
    return set()


def sockets(process: psutil.Process) -> Path:
    """Return the directory of the server's sockets. The server holds it open."""
    held = (file.resolve() for file in Path(f"/proc/{process.pid}/fd").iterdir())
    return next(path for path in held if path.name.startswith("slipway-sockets-"))


@pytest.mark.slow
@pytest.mark.parametrize("dies_first", [True, False])
def test_a_server_that_stops_finishes_calls_on_another_engine(
    tmp_path: Path, small_options: dict[str, object], dies_first: bool
) -> None:
    environment = {"SERVING_ENGINE_RESTART": "1", "SERVING_DRAIN_TIMEOUT": "200"}
    long = cases(tokens=800)  # These calls still run when the server begins to drain.
    calls = {name: long[name] for name in ("LMI", "completion, stream")}
    with serving(tmp_path, environment, **small_options) as server:
        undisturbed = answers(server, calls)

        def disturb() -> None:
            if dies_first:
                kill(server, len(calls))
                server.wait_for_log(WAITING)
            wait_until(lambda: server.metric("slipway_open_requests") >= len(calls))
            os.kill(server.process.pid, signal.SIGTERM)
            wait_until(lambda: server.ping() == 503)
            if not dies_first:
                kill(server, len(calls))

        assert answers(server, calls, disturb) == undisturbed
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_stalled_engine_is_started_again_once_and_its_calls_are_continued(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    environment = {"SERVING_ENGINE_RESTART_WHEN_STALLED": "true", "SERVING_STALL_TIMEOUT": "20"}
    environment["SERVING_ENGINE_RESTART"] = "3"
    with serving(tmp_path, environment, **small_options) as server:
        undisturbed = answer(server, CASES["LMI"])
        calls = {"LMI": CASES["LMI"]}
        assert answers(server, calls, lambda: step_until_running(server, 1)) == {"LMI": undisturbed}
        assert server.log_text().count("the engine is started again in") == 1


VECTORS = {
    "LMI": Case("/invocations", {"inputs": ["the capital of france", "a dog runs"]}),
    "OpenAI": Case("/v1/embeddings", {"model": "model", "input": "the capital of france"}),
    "TEI": Case("/embed", {"inputs": "a dog runs"}),
    "vLLM": Case("/pooling", {"model": "model", "input": "a dog runs"}),
}


@pytest.mark.long
def test_vectors_of_prompts_that_the_engine_had_come_from_the_next_one(tmp_path: Path) -> None:
    options = {"rolling_batch": "vllm", "dtype": "fp32", "kv_cache_memory_bytes": 64 << 20}
    environment = {"SERVING_ENGINE_RESTART": "3"}
    with serving(tmp_path, environment, model_id=prepare_small_encoder(), **options) as server:
        undisturbed = answers(server, VECTORS)
        worker = server.worker_process().pid

        def disturb() -> None:
            server.wait_for_metric("slipway_open_requests", len(VECTORS))
            os.kill(worker, signal.SIGKILL)
            signal_engines(server, signal.SIGCONT)

        assert answers(server, VECTORS, disturb) == undisturbed
        assert server.metric("slipway_continued_calls_total") >= len(VECTORS)
