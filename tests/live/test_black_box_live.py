"""Black boxes of a real server: each names the frame of the fault, or the process that has died."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import Server, serving, serving_copy, stopped
from tests.live.small_model import ENDLESS
from tests.live.test_custom_handlers_live import HANDLERS
from tests.waiting import wait_until

STALL_TIMEOUT = 12.0
PROMPT, KEY, HEADER = "a prompt that no file may have", "key-that-no-file-may-have", "header-that-no-file-may-have"
MOST_BYTES = 1_000_000
LMI_STREAM = {"inputs": PROMPT, "stream": True, "parameters": ENDLESS}
OPENAI_STREAM = {  # The model never ends this stream.
    "model": "model",
    "prompt": PROMPT,
    "stream": True,
    "max_tokens": 60000,
    "structured_outputs": {"regex": "[a-z]+"},
}
CHAT_OF_VLLM = {  # Because of the last field, vLLM's front end answers the chat.
    "model": "model",
    "messages": [{"role": "user", "content": PROMPT}],
    "stream": True,
    "max_tokens": 60000,
    "ignore_eos": True,
    "return_token_ids": True,
}
BODY_ID = "the-id-of-the-body"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    variables = {
        "SERVING_API_KEYS": KEY,
        "SERVING_STALL_TIMEOUT": str(STALL_TIMEOUT),
        "SERVING_ENGINE_RESTART": "3",
        "SERVING_BLACKBOX_LOG": "true",
    }
    with serving(tmp_path_factory.mktemp("black-box"), variables, **small_options) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


def request_id(path: str) -> str:
    return f"the-call-of-{path.count('/')}"


def open_stream(server: Server, path: str = "/invocations", document: dict[str, Any] = LMI_STREAM) -> socket.socket:
    body = json.dumps(document).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"x-trace: {HEADER}\r\nauthorization: Bearer {KEY}\r\n"
    )
    if "request_id" not in document:
        head += f"x-request-id: {request_id(path)}\r\n"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(f"{head}\r\n".encode() + body)
    assert client.recv(1)
    return client


def boxes(server: Server, cause: str) -> list[Path]:
    return sorted(server.boxes_dir.glob(f"blackbox-*-{cause}.json"))


def new_box(server: Server, cause: str, before: list[Path]) -> tuple[Path, dict[str, Any]]:
    """Wait for a new black box."""

    def new() -> list[Path]:
        return [path for path in boxes(server, cause) if path not in before]

    wait_until(new, about=server.log_text)
    (path,) = new()
    text = path.read_text()
    assert not any(secret in text for secret in (PROMPT, KEY, HEADER))
    assert len(text) < MOST_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path, json.loads(text)


def of_vllm(box: dict[str, Any], part: str) -> dict[str, Any]:
    (process,) = [p for p in box["processes"] if p["name"].startswith("VLLM::") and part in p["name"]]
    return dict(process)


def reason(server: Server) -> str:
    return str(server.client.get("/ping").json()["model"].get("reason", ""))


def test_a_person_gets_the_box_of_a_server_that_works(running: Server) -> None:
    with (
        open_stream(running),
        open_stream(running, "/v1/completions", OPENAI_STREAM),
        open_stream(running, "/v1/chat/completions", CHAT_OF_VLLM),
        open_stream(running, "/v1/chat/completions", {**CHAT_OF_VLLM, "request_id": BODY_ID}),
    ):
        wait_until(lambda: running.metric("slipway_generated_tokens_total") > 30)
        answer = running.client.get("/server/blackbox")
    assert answer.status_code == 200
    assert not any(secret in answer.text for secret in (PROMPT, KEY, HEADER))
    box = answer.json()
    calls = box["calls"]["listed"]
    routes = ["/invocations", "/v1/completions", "/v1/chat/completions"]
    ids = [*map(request_id, routes), BODY_ID]
    assert [(call["route"], call["id"]) for call in calls] == list(zip([*routes, routes[-1]], ids, strict=True))
    for call, constraint in zip(calls, (None, "regex", None, None), strict=True):
        running.wait_for_log(call["id"])
        (sequence,) = call["sequences"]
        assert sequence["prompt_tokens"] > 3
        assert sequence["tokens"] > 0
        assert (sequence["copy"], sequence.get("constraint")) == (1, constraint)
    assert box["calls"]["other_sequences"] == 0
    for part in ("EngineCore", "Worker"):
        process = of_vllm(box, part)
        assert process["memory_bytes"] > 1 << 20
        assert any("vllm" in frame for frame in process["stacks"][0]["frames"])
    steps = box["models"][0]["engine"]["steps"]["1"]
    assert steps["last"][-1][1] == 4, "four requests run"
    assert sum(second[1] for second in steps["by_second"]) > 3
    assert {"slipway", "torch", "python"} <= box["versions"].keys()
    assert any(setting["name"] == "stall_timeout" for setting in box["models"][0]["settings"]["settings"])
    assert running.client.get("/server/blackbox", headers={"authorization": "Bearer no"}).status_code == 401
    page = {"origin": "http://elsewhere.example", "user-agent": "Mozilla/5.0"}
    assert running.client.get("/server/blackbox", headers=page).status_code == 403
    assert not boxes(running, "asked")


def test_a_worker_that_is_stopped_is_named(running: Server) -> None:
    before, worker = boxes(running, "stall"), running.worker_process().pid
    with open_stream(running), stopped(worker):
        path, box = new_box(running, "stall", before)
        wait_until(lambda: str(path) in reason(running), about=lambda: reason(running))
    named = of_vllm(box, "Worker")
    assert (named["pid"], named["state"], named["stacks"]) == (worker, "stopped", [])
    assert any(f"process {worker}" in finding and "is stopped" in finding for finding in box["findings"])
    assert of_vllm(box, "EngineCore")["stacks"], "the engine waits for its worker"
    (sequence,) = box["calls"]["listed"][0]["sequences"]
    assert sequence["seconds_since_last_token"] > STALL_TIMEOUT / 2
    assert box["models"][0]["engine"]["steps"]["1"]["seconds_since_last"] > STALL_TIMEOUT / 2
    running.wait_for_log(str(path))
    running.wait_for_log("black box, short form: ")
    (line,) = [line for line in running.log_text().splitlines() if "short form: {" in line and str(path) in line]
    short = json.loads(line.partition("short form: ")[2])
    assert len(line) < 8000
    assert (short["findings"], short["oldest_calls"]) == (box["findings"], [request_id("/invocations")])
    assert short["processes"][0]["in"], "the server's own place"
    wait_until(lambda: running.ping() == 200 and not reason(running))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "finding"), [("engine", "was killed by SIGKILL"), ("worker", "has ended")])
def test_a_process_that_is_killed_is_named_and_its_calls_go_on(running: Server, kind: str, finding: str) -> None:
    before = boxes(running, "death")
    killed = running.engine_process() if kind == "engine" else running.worker_process().pid
    with open_stream(running):
        os.kill(killed, signal.SIGKILL)
        _, box = new_box(running, "death", before)
        assert any(f"process {killed} " in one and finding in one for one in box["findings"]), box["findings"]
        (call,) = box["calls"]["listed"]
        assert call["sequences"][0]["tokens"] > 0
        running.wait_for_log("has been restarted")
        wait_until(lambda: not reason(running))
    running.wait_for_metric("slipway_open_requests", 0)


def test_a_signal_has_the_server_write_a_box(running: Server) -> None:
    before = boxes(running, "asked")
    running.process.send_signal(signal.SIGQUIT)
    path, box = new_box(running, "asked", before)
    assert box["cause"] == "asked"
    assert running.ping() == 200
    assert path.parent == running.boxes_dir


@pytest.mark.slow
def test_a_handler_that_never_returns_is_named_with_its_line(tmp_path: Path) -> None:
    with serving_copy(HANDLERS / "slow", tmp_path, properties="retry_threshold=5", predict_timeout=10) as server:
        assert server.client.post("/invocations", content=b"600").status_code == 503
        path, box = new_box(server, "worker", [])
        (finding,) = box["findings"]
        assert "/model/model.py" in finding
        assert finding.endswith("in handle")
        hung = box["models"][0]["handler"]["last_failed"]
        assert "predict_timeout" in hung["reason"]
        assert hung["stacks"]
        server.wait_for_log(str(path))
