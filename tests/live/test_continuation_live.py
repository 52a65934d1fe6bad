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
    STEPPED,
    Case,
    add_adapters,
    answer,
    answers,
    kill,
    pause,
    resume,
    step_until_running,
)
from tests.live.deadly_prompts import RAISES
from tests.live.lora import make_adapter
from tests.live.partly_held import NOT_HELD, PLACE, A, assert_judged, tags, verdicts
from tests.live.server import START_SECONDS, Server, serving, stopped
from tests.live.small_model import ENDLESS, ENDLESS_STREAM
from tests.live.small_pooling_models import prepare_small_encoder
from tests.waiting import wait_until

WAITING = "the engine has died; calls wait for it"
DEAD = "the engine has died; the request was not completed"
VLLMS_WAY = {"return_token_ids": True}  # Because of this field, vLLM's front end answers the call.
LOST = {"presence_penalty": 0.5}  # A call with this field is not continued.
SHOWN = "document.querySelector('#view-server').textContent.includes('{}')"


@pytest.fixture(scope="module")
def restarting(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server whose engine dies in each test. The pause before a restart doubles each time, from one second."""
    directory = tmp_path_factory.mktemp("restarting")
    add_adapters(directory / "model", Path(str(small_options["model_id"])))
    environment = {"SERVING_ENGINE_RESTART": "1000", "SERVING_JOB_QUEUE_SIZE": "100"}
    with serving(directory, environment, **OPTIONS, **small_options) as server:
        yield server


@pytest.mark.slow
def test_each_client_gets_the_answer_that_it_would_have_got_and_restarts_leave_nothing(restarting: Server) -> None:
    """An engine dies while the calls run, and the next engine dies while it starts."""
    process = psutil.Process(restarting.process.pid)
    undisturbed = answers(restarting, CASES)
    threads, descriptors = process.num_threads(), process.num_fds()
    restarts, pings = restarting.metric("slipway_engine_restarts_total"), []
    with ThreadPoolExecutor(1) as pool:

        def disturb() -> None:
            first = restarting.engine_process()
            kill(restarting, 8)
            new = pool.submit(answer, restarting, CASES["LMI"])
            wait_until(lambda: engines(restarting) - {first})
            os.kill((engines(restarting) - {first}).pop(), signal.SIGKILL)
            while not wait([new], timeout=0.1).done:
                pings.append(restarting.ping())
            assert new.result() == undisturbed["LMI"]

        assert answers(restarting, CASES, disturb) == undisturbed
    assert set(pings) == {200}
    assert restarting.metric("slipway_continued_calls_total") > 4
    assert restarting.metric("slipway_engine_restarts_total") == restarts + 2
    assert restarting.metric("slipway_engine_down_seconds_total") > 0
    restarting.wait_for_log(WAITING)
    # The event loop starts threads for functions as it needs them. A fault once left four threads and nine descriptors
    # at each restart.
    wait_until(lambda: process.num_threads() < threads + 5)
    wait_until(lambda: process.num_fds() < descriptors + 5)
    memory = f"*{sockets(process).name}-*"
    assert [*Path("/dev/shm").glob(memory)]
    engine = restarting.engine_process()
    wait_until(lambda: all(f"-{engine}-" in file.name for file in Path("/dev/shm").glob(memory)))


@pytest.mark.slow
def test_stop_strings_and_schemas_hold_for_continued_answers(restarting: Server) -> None:
    def choice(**given: Any) -> dict[str, Any]:
        body = {"model": "model", "max_tokens": 100, "ignore_eos": True, "temperature": 0, "prompt": "Twice"}
        found: dict[str, Any] = restarting.client.post("/v1/completions", json=body | given).json()["choices"][0]
        return found

    stop = (whole := choice()["text"])[-12:-4]
    expected = choice(stop=stop)
    assert expected["finish_reason"] == "stop"
    assert len(expected["text"]) <= whole.index(stop)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": tags(items=A, minItems=40, maxItems=40)}}
    body = {"prompt": "Once", "max_tokens": 2000, "response_format": form}
    before = verdicts(restarting)
    with ThreadPoolExecutor(3) as pool:
        pause(restarting)
        stopped_text = pool.submit(choice, stop=stop)
        calls = [pool.submit(restarting.client.post, "/v1/completions", json=body | way) for way in ({}, VLLMS_WAY)]
        restarting.wait_for_metric("slipway_open_requests", 3)
        kill(restarting, 3, by=signal.SIGTERM)  # vLLM's process aborts its sequences.
        assert stopped_text.result() == expected
        replies = [call.result() for call in calls]
    for reply in replies:
        assert json.loads(reply.json()["choices"][0]["text"]) == {"tags": ["a"] * 40}
        assert reply.headers[NOT_HELD] == PLACE
    assert_judged(restarting, before, invalid=2)


@pytest.mark.slow
def test_calls_that_cannot_continue_get_the_error_and_clients_may_leave_and_come_meanwhile(
    restarting: Server, small_options: dict[str, object], tmp_path: Path
) -> None:
    """Calls cannot continue if their answers depend on lost state, or if the files of their adapter have changed."""
    adapter = make_adapter(tmp_path / "mine", small_options["model_id"], 1)
    other = make_adapter(tmp_path / "other", small_options["model_id"], 2)
    assert restarting.client.post("/adapters", params={"name": "mine", "src": str(adapter)}).status_code == 200
    aborted = restarting.metric("slipway_generations_aborted_total")
    leaving = [restarting.send("/invocations", {"inputs": "Once", "parameters": ENDLESS, "stream": True})]
    leaving.append(restarting.send("/v1/completions", ENDLESS_STREAM | VLLMS_WAY))
    one = ENDLESS_STREAM | {"n": 1}
    bodies = [one | LOST, one | LOST | VLLMS_WAY, one | {"model": "mine"}]
    with ThreadPoolExecutor(len(bodies)) as pool, ExitStack() as streams:
        rests = []
        for body in bodies:
            stream = streams.enter_context(restarting.client.stream("POST", "/v1/completions", json=body))
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            rests.append(pool.submit(list, filter(None, lines)))
        shutil.copyfile(other / "adapter_model.safetensors", adapter / "adapter_model.safetensors")
        first = restarting.engine_process()
        kill(restarting, 7)
        wait_until(lambda: engines(restarting) - {first})
        (new,) = engines(restarting) - {first}
        with stopped(new):
            for connection in leaving:
                connection.close()
            restarting.wait_for_metric("slipway_generations_aborted_total", aborted + 2)
        for rest in rests:
            *_, last, done = rest.result()
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == DEAD
            assert done == "data: [DONE]"
    restarting.wait_for_log("2 cannot be: presence_penalty and frequency_penalty count the tokens of the answer alone")
    restarting.wait_for_log("1 cannot be: its adapter cannot be loaded again")
    assert restarting.invoke("Once", max_new_tokens=3).status_code == 200
    restarting.wait_for_metric("slipway_engine_running", 0)
    restarting.wait_for_metric("slipway_open_requests", 0)
    asked = {"inputs": "Once", "adapters": "mine"}
    refused = restarting.client.post("/invocations", json=asked)
    assert (refused.status_code, "register it again" in refused.text) == (424, True)
    assert restarting.client.delete("/adapters/mine").status_code == 200
    assert restarting.client.post("/adapters", params={"name": "mine", "src": str(adapter)}).status_code == 200
    assert restarting.client.post("/invocations", json=asked).status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_the_console_shows_the_restart_and_the_calls_that_continued(restarting: Server, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser, ThreadPoolExecutor(1) as pool:
        page = browser.new_page()
        page.open(f"{restarting.url}/console#server")
        page.wait_for("document.querySelector('#status')?.dataset.state === 'ready'")
        pause(restarting)
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
        row = f"{restarts:.0f} of 1000 in 10 minutes; {calls}"
        page.wait_for(SHOWN.format(row))
        page.wait_for("document.querySelector('#status').dataset.state === 'ready'")
        assert page.text("#status").startswith("model · ready")
        assert not page.complaints


@pytest.mark.slow
def test_a_call_that_kills_each_engine_gets_the_error_alone_and_the_others_too_when_no_restart_is_left(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    """The engine dies twice while all calls run, and once when the deadly prompt runs alone."""
    environment = {"SERVING_ENGINE_RESTART": "3"}
    worker = "tests.live.engine_workers.DeadlyWorker"
    with serving(tmp_path, environment, worker_cls=worker, **small_options) as server, ThreadPoolExecutor(2) as pool:

        def disturb() -> None:
            step_until_running(server, len(calls) / 2)
            body = {"model": "model", "prompt": RAISES, "max_tokens": 5}
            before = server.metric("slipway_generations_total")
            killer = pool.submit(server.client.post, "/v1/completions", json=body, timeout=START_SECONDS)
            wait_until(lambda: server.metric("slipway_generations_total") > before)
            resume(server)
            response = killer.result()
            assert (response.status_code, response.json()["error"]["message"]) == (500, DEAD)

        calls = {name: PLAIN[name] for name in FEW}
        undisturbed = answers(server, calls)
        assert answers(server, calls, disturb) == undisturbed
        assert server.metric("slipway_engine_restarts_total") == 3
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
def test_a_server_that_stops_finishes_calls_on_another_engine(tmp_path: Path, small_options: dict[str, object]) -> None:
    environment = {"SERVING_ENGINE_RESTART": "1", "SERVING_DRAIN_TIMEOUT": "200"}
    calls = {name: CASES[name] for name in ("LMI", "completion, stream")}
    with serving(tmp_path, environment, **small_options, **STEPPED) as server:
        undisturbed = answers(server, calls)

        def disturb() -> None:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.ping() == 503)
            kill(server, len(calls))

        assert answers(server, calls, disturb) == undisturbed
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_stalled_engine_is_started_again_once_and_its_calls_are_continued(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    environment = {"SERVING_ENGINE_RESTART_WHEN_STALLED": "true", "SERVING_STALL_TIMEOUT": "20"}
    environment["SERVING_ENGINE_RESTART"] = "3"
    with serving(tmp_path, environment, **small_options, **STEPPED) as server:
        undisturbed = answer(server, CASES["LMI"])

        def disturb() -> None:
            stalled = server.engine_process()
            step_until_running(server, 1)
            wait_until(lambda: stalled not in engines(server))
            resume(server)

        assert answers(server, {"LMI": CASES["LMI"]}, disturb) == {"LMI": undisturbed}
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
    with serving(tmp_path, environment, model_id=prepare_small_encoder(), **options, **STEPPED) as server:
        undisturbed = answers(server, VECTORS)
        worker = server.worker_process().pid

        def disturb() -> None:
            os.kill(worker, signal.SIGKILL)
            resume(server)

        assert answers(server, VECTORS, disturb) == undisturbed
        assert server.metric("slipway_continued_calls_total") >= len(VECTORS)
