"""Trustworthy health: the status of /ping at every moment, and the end of all processes after a SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.live.draining import open_stream
from tests.live.server import Server, records, serving, stopped
from tests.live.small_model import ENDLESS_COMPLETION
from tests.waiting import lives, wait_until

GENERATED = "slipway_generated_tokens_total"
STALL_TIMEOUT, PREDICT_TIMEOUT = 8, 20
"""The timeouts in seconds. On a busy machine, there may be some seconds between two steps of the engine."""


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server. The last test kills it."""
    directory = tmp_path_factory.mktemp("health")
    options = small_options | {"predict_timeout": PREDICT_TIMEOUT, "sessions_path": directory / "sessions"}
    with serving(directory, {"SERVING_STALL_TIMEOUT": str(STALL_TIMEOUT)}, **options) as server:
        yield server


def status(server: Server) -> tuple[int, dict[str, str]]:
    answer = server.client.get("/ping")
    model: dict[str, str] = answer.json()["model"]
    return answer.status_code, model


@pytest.mark.slow
def test_an_engine_that_stands_still_with_requests_is_unhealthy_until_it_goes_on(vllm_server: Server) -> None:
    chat = {"model": "model", "messages": [{"role": "user", "content": "Go on."}], **ENDLESS_COMPLETION, "stream": True}
    del chat["prompt"]
    with open_stream(vllm_server), vllm_server.send("/v1/chat/completions", chat):
        vllm_server.wait_for_metric("slipway_engine_running", 2)
        with stopped(vllm_server.engine_process()):
            wait_until(lambda: vllm_server.ping() == 500)
            code, model = status(vllm_server)
            assert (code, model["status"]) == (500, "Unhealthy")
            assert "the engine is stalled" in model["reason"]
            assert vllm_server.metric("slipway_engine_stalled") == 1
            assert vllm_server.metric("slipway_ready") == 0
            assert vllm_server.client.get("/v2/health/ready").status_code == 400
            assert vllm_server.client.get("/v2/health/live").status_code == 200
            before = vllm_server.metric(GENERATED)
        wait_until(lambda: vllm_server.ping() == 200)
        wait_until(lambda: vllm_server.metric(GENERATED) > before + 10)
        assert vllm_server.metric("slipway_engine_running") == 2
    vllm_server.wait_for_metric("slipway_open_requests", 0)
    assert vllm_server.metric("slipway_engine_stalled") == 0

    def stalls_ended() -> bool:
        log = vllm_server.log_text()
        return log.count("/ping now answers 500") == log.count("the engine goes on after") > 0

    wait_until(stalls_ended, about=vllm_server.log_text)


@pytest.mark.slow
def test_stuck_requests_end_by_predict_timeout_and_the_engine_stays_unhealthy_until_it_moves(
    vllm_server: Server,
) -> None:
    chat = {"model": "model", "messages": [{"role": "user", "content": "Go on."}]}
    with ThreadPoolExecutor(2) as pool:
        with stopped(vllm_server.engine_process()):
            calls = [
                pool.submit(vllm_server.invoke, "Once"),
                pool.submit(vllm_server.client.post, "/v1/chat/completions", json=chat),
            ]
            answers = [call.result() for call in calls]
            assert [answer.status_code for answer in answers] == [424, 500]
            assert "no token within predict_timeout" in answers[0].text
            assert "no token within predict_timeout" in answers[1].text
            vllm_server.wait_for_metric("slipway_open_requests", 0)
            assert status(vllm_server)[0] == 500, "nothing runs any more, but nothing has come either"
        wait_until(lambda: vllm_server.ping() == 200)
    assert vllm_server.invoke("Once", max_new_tokens=2).status_code == 200


def session(server: Server, document: dict[str, Any], session_id: str = "") -> httpx.Response:
    headers = {"X-Amzn-SageMaker-Session-Id": session_id} if session_id else {}
    return server.client.post("/invocations", json=document, headers=headers)


def test_a_session_is_created_used_by_all_kinds_of_calls_and_closed(vllm_server: Server) -> None:
    new = session(vllm_server, {"requestType": "NEW_SESSION"}, "NEW_SESSION")
    value = new.headers["x-amzn-sagemaker-new-session-id"]
    assert new.headers["x-amzn-sagemaker-session-id"] == value
    name, _, expires = value.partition("; Expires=")
    assert (new.status_code, new.text) == (200, f'{{"result": "Session {name} created"}}\n')
    assert expires.endswith("Z")
    plain = {"inputs": "Once", "parameters": {"max_new_tokens": 2}}
    assert session(vllm_server, plain, name).json().keys() == {"generated_text"}
    streamed = session(vllm_server, plain | {"stream": True}, name)
    assert "generated_text" in records(streamed.text)[-1]
    chat = session(vllm_server, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}, name)
    assert chat.status_code == 200
    closing = session(vllm_server, {"requestType": "CLOSE"}, name)
    assert (closing.status_code, closing.text) == (200, f'{{"result": "Session {name} closed"}}\n')
    assert closing.headers["x-amzn-sagemaker-closed-session-id"] == name
    for document in (plain, plain | {"stream": True}, {"requestType": "CLOSE"}):
        gone = session(vllm_server, document, name)
        assert (gone.status_code, gone.json()) == (424, {"error": f"session not found: {name}", "code": 424})
    assert session(vllm_server, plain).status_code == 200


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process, or "" if it has ended since it was listed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def test_nothing_outlives_a_server_that_is_killed(vllm_server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    held = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    answer = vllm_server.client.post("/v1/chat/completions", json=chat | held | {"model": "model"})
    assert answer.status_code == 200, answer.text  # it started a grammar trial
    children = vllm_server.children()
    names = " ".join(map(command_line, children))
    assert "EngineCore" in names
    assert "trial_process" in names
    os.kill(vllm_server.engine_process(), signal.SIGSTOP)  # a stopped process cannot notice that the server has ended
    vllm_server.process.kill()
    vllm_server.process.wait(60)
    wait_until(lambda: not any(map(lives, children)), about=lambda: list(filter(lives, children)))
