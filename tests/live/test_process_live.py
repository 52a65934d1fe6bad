"""The server's process: its health, clients that disconnect, overload, draining, and an engine that dies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.live.draining import drain, open_stream
from tests.live.lora import make_adapter
from tests.live.server import START_SECONDS, Server, hosted, records, serving, write_model
from tests.live.small_model import ENDLESS, ENDLESS_STREAM
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def tiny(host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a model with requests that run until their clients leave. The last test kills the model's engine."""
    with hosted(host, write_model(tmp_path_factory.mktemp("tiny") / "model", **small_options)) as model:
        yield model


def test_sixty_clients_that_disconnect_leave_nothing_running(tiny: Server) -> None:
    begun, aborted = map(tiny.metric, ("slipway_generations_total", "slipway_generations_aborted_total"))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(open_stream(tiny)) for _ in range(60)]
        for client in clients[:20]:
            assert client.recv(64).startswith(b"HTTP/1.1 200")
        tiny.wait_for_metric("slipway_generations_total", begun + 60)
        assert tiny.metric("slipway_engine_running") > 0
    for gauge in ("slipway_open_requests", "slipway_engine_running", "slipway_engine_waiting"):
        tiny.wait_for_metric(gauge, 0)
    assert tiny.metric("slipway_generations_aborted_total") == aborted + 60


def test_prompts_are_not_logged(server: Server) -> None:
    for tokens in (2, -1):
        body = {"inputs": "a very secret prompt", "parameters": {"max_new_tokens": tokens}}
        server.client.post("/invocations", json=body, headers={"x-request-id": f"secret-{tokens}"})
        server.wait_for_log(f"[secret-{tokens}]: POST /invocations")
    assert "very secret" not in server.log_text()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with low limits and JSON logs. The last test with this server stops it."""
    # vLLM's sockets are in this directory, because the paths of pytest's directories are too long for sockets.
    with TemporaryDirectory(prefix="slipway-test-") as temporary:
        environment = {
            "SERVING_MAX_REQUEST_SIZE": "2000",
            "SERVING_JOB_QUEUE_SIZE": "2",
            "SERVING_LOG_FORMAT": "json",
            "SERVING_DRAIN_TIMEOUT": "15",
            "TMPDIR": temporary,
        }
        options = small_options | {"max_rolling_batch_size": 2}
        with serving(tmp_path_factory.mktemp("small"), environment, **options) as server:
            yield server


def test_a_body_over_the_limit_is_413_and_a_full_queue_503(small: Server) -> None:
    assert small.client.post("/invocations", content=b"x" * 3000).status_code == 413
    with contextlib.ExitStack() as clients:
        for _ in range(4):
            clients.enter_context(open_stream(small))
        for gauge in ("slipway_engine_running", "slipway_engine_waiting"):
            small.wait_for_metric(gauge, 2)
        refused = small.invoke("Once")
        assert small.ping() == 200, "a full queue is no reason to be unhealthy"
    assert (refused.status_code, refused.json()["type"]) == (503, "WlmCapacityException")
    small.wait_for_metric("slipway_open_requests", 0)
    assert small.invoke("Once", max_new_tokens=2).status_code == 200

    def access_logged() -> bool:
        own = [json.loads(line) for line in small.log_text().splitlines(keepends=True) if re.match(r"\{.*\n", line)]
        return any(line["logger"] == "slipway.access" and line["request_id"] for line in own)

    wait_until(access_logged, about=small.log_text)


def test_ctrl_c_lets_requests_on_vllm_finish_and_the_stop_is_quiet_and_leaves_nothing(small: Server) -> None:
    temporary = Path(small.environment["TMPDIR"])
    assert [path for path in temporary.rglob("*") if path.is_socket()], "vLLM has its sockets elsewhere now"
    drain(small, signal.SIGINT)
    assert not [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # a cache


def test_a_killed_engine_ends_its_requests_and_ping_says_so(tiny: Server) -> None:
    server = tiny
    begun = server.metric("slipway_generations_total")
    with ThreadPoolExecutor(4) as pool:
        plain = pool.submit(server.invoke, "Once", **ENDLESS)
        stream = pool.submit(server.invoke, "Once", stream=True, **ENDLESS)
        server.wait_for_metric("slipway_generations_total", begun + 2)
        beams = pool.submit(server.invoke, "Once", num_beams=2, **ENDLESS)
        wait_until(lambda: server.metric("slipway_generations_total") > begun + 2)
        wait_until(lambda: server.metric("slipway_engine_running") > 1)
        worker = server.worker_process()
        os.kill(server.engine_process(), signal.SIGKILL)
        for call in (plain, beams):
            assert call.result().status_code == 500
            assert "the engine has died" in call.result().json()["error"]
        last = records(stream.result().text)[-1]
        assert last["details"]["finish_reason"] == "error"
        assert server.ping() == 500
        assert server.client.get("/ping").json() == {server.name: {"status": "FAILED", "reason": "the engine has died"}}
        assert server.invoke("Once").status_code == 500
        server.wait_for_metric("slipway_engine_running", 0)
        worker.wait(60)


@pytest.mark.slow
def test_an_engine_that_dies_or_stalls_is_started_again_as_often_as_it_may_and_then_the_process_ends(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    environment = {
        "SERVING_ENGINE_RESTART": "2",
        "SERVING_CONTINUE": "0",
        "SERVING_ENGINE_RESTART_WHEN_STALLED": "true",
        "SERVING_STALL_TIMEOUT": "15",
        "SERVING_FAIL_FAST": "true",
    }
    adapter = make_adapter(tmp_path / "red", small_options["model_id"], 1)
    with serving(tmp_path, environment, enable_lora="true", **small_options) as server:
        assert server.client.post("/adapters", params={"name": "red", "src": str(adapter)}).status_code == 200
        assert (said := adapted(server)) != adapted(server, "")
        stalled = "the engine is stalled: requests run, and nothing has come of them for"
        said_at = {
            "killed worker": "the engine has died; the request was not completed",
            "stopped engine": rf"{stalled} \d\d+ s; it is started again; the request was not completed",
        }
        for attempt, fault in enumerate(said_at, start=1):
            with ThreadPoolExecutor(2) as pool:
                own = pool.submit(server.invoke, "Once", stream=True, **ENDLESS)
                openai = pool.submit(server.client.post, "/v1/completions", json=ENDLESS_STREAM)
                wait_until(lambda: server.metric("slipway_engine_running") > 1)
                if fault == "killed worker":
                    os.kill(server.worker_process().pid, signal.SIGKILL)
                else:
                    os.kill(server.engine_process(), signal.SIGSTOP)
                assert records(own.result().text)[-1]["details"]["finish_reason"] == "error"
                *_, last, done = openai.result().text.strip().split("\n\n")
                message = json.loads(last.removeprefix("data: "))["error"]["message"]
                assert re.fullmatch(said_at[fault], message)
                assert done == "data: [DONE]"
            pause = f"{2 ** (attempt - 1)} s ({attempt} of 2 within 10 minutes)"
            server.wait_for_log(f"/ping now answers 500; the engine is started again in {pause}")
            wait_until(lambda: server.ping() == 200, START_SECONDS, about=server.log_text)
            assert server.invoke("Once", max_new_tokens=3).status_code == 200
            completion = {"model": "model", "prompt": "Once", "max_tokens": 3}
            assert server.client.post("/v1/completions", json=completion).status_code == 200
            assert adapted(server) == said, "adapters are there again"
        with ThreadPoolExecutor(1) as pool:
            plain = pool.submit(server.invoke, "Once", **ENDLESS)
            server.wait_for_metric("slipway_engine_running", 1)
            os.kill(server.engine_process(), signal.SIGKILL)
            assert plain.result().status_code == 500
        assert server.process.wait(60) == 137


def adapted(server: Server, adapter: str = "red") -> str:
    """Return the model's text with an adapter."""
    body = {"inputs": "Once upon a time", "adapters": adapter, "parameters": {"max_new_tokens": 12}}
    response = server.client.post("/invocations", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["generated_text"]
    return text


@pytest.mark.slow
def test_ping_is_not_200_before_the_model_generates_and_a_stop_while_loading_is_quick(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    model = write_model(tmp_path / "model", worker_cls="tests.live.engine_workers.LoadingWorker", **small_options)
    with TemporaryDirectory(prefix="slipway-test-") as temporary:
        server = Server(model, tmp_path / "server.log", {"TMPDIR": temporary})
        sockets = partial(Path(temporary).glob, "slipway-sockets-*")
        try:
            wait_until(lambda: [*sockets()] and server.has_engine_process(), START_SECONDS, about=server.log_text)
            response = server.client.get("/ping")
            assert (response.status_code, response.json()) == (503, {"model": {"status": "PENDING"}})
            refused = server.invoke("Hello")
            assert refused.status_code == 503
            assert "not loaded yet" in refused.json()["message"]
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            assert not [*sockets()]
        finally:
            server.stop()


@pytest.mark.parametrize("end", ["SIGTERM", "failure"])
def test_calls_of_a_loaded_model_end_well_if_another_is_still_loading(tmp_path: Path, end: str) -> None:
    handlers = Path(__file__).parents[1] / "fixtures" / "handlers"
    shutil.copytree(handlers / "slow", tmp_path / "first")
    shutil.copytree(handlers / "slow", tmp_path / "second")
    gate, opened = tmp_path / "gate", tmp_path / "opened"
    (tmp_path / "second" / "model.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.02)\nraise OSError('broken')\n"
    )
    (tmp_path / "second" / "serving.properties").write_text("option.entryPoint=model.py\n")
    environment = {"SERVING_LOAD_MODELS": f"first={tmp_path / 'first'},second={tmp_path / 'second'}"}
    environment["SERVING_DRAIN_TIMEOUT"] = "200"
    server = Server(None, tmp_path / "server.log", environment, name=None)
    try:
        wait_until(lambda: "model first is ready" in server.log_text(), START_SECONDS)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(server.client.post, "/predictions/first", content=str(opened))
            wait_until(lambda: server.metric("slipway_workers_busy", "first") == 1)
            if end == "SIGTERM":
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: server.ping() == 503)
            else:
                gate.touch()
                wait_until(lambda: "cannot be served" in server.log_text())
            opened.touch()
            assert call.result().status_code == 200, call.result().text
        assert server.process.wait(60) == (0 if end == "SIGTERM" else 1), server.log_text()
    finally:
        server.stop()


def shared_memory(server: Server) -> set[Path]:
    """Return the shared-memory files that the server's processes have mapped, if they still exist."""
    mapped = {Path(area.path) for process in server.children() for area in process.memory_maps()}
    return {path for path in mapped if path.parent == Path("/dev/shm") and path.exists()}


@pytest.mark.slow
def test_a_second_sigterm_ends_the_process_at_once_and_leaves_no_shared_memory(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    with serving(tmp_path, {"SERVING_DRAIN_TIMEOUT": "200"}, **small_options) as server, open_stream(server):
        server.wait_for_metric("slipway_engine_running", 1)
        shared = shared_memory(server)
        assert shared, "vLLM's processes talk in another way now"
        began = server.client.post("/invocations", json={"requestType": "NEW_SESSION"})
        session = Path("/dev/shm/djl_sessions") / began.headers["X-Amzn-SageMaker-Session-Id"].partition(";")[0]
        assert session.exists()
        shared.add(session)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.ping() == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM
        wait_until(lambda: not [path for path in shared if path.exists()], about=lambda: str(shared))


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        ({"model_id": "{broken}", "rolling_batch": "vllm"}, 1, "the model cannot be served: vLLM cannot load"),
        pytest.param(
            {"model_id": "{broken}", "rolling_batch": "disable"}, 1, "transformers cannot load", marks=pytest.mark.long
        ),
        ({"dtype": "fp7"}, 2, "option.dtype"),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_process_and_says_why(
    tmp_path: Path,
    engine_options: dict[str, object],
    options: dict[str, str],
    exit_code: int,
    message: str,
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchForCausalLM"]}')
    given = {name: value.replace("{broken}", str(broken)) for name, value in options.items()}
    model_dir = write_model(tmp_path / "model", **(engine_options | given))
    server = Server(model_dir, tmp_path / "server.log")
    try:
        assert server.process.wait(START_SECONDS) == exit_code
        server.wait_for_log(message)
    finally:
        server.stop()
