"""The memory of a server after calls with large bodies, without the collection of reference cycles."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.live.pictures import data_url, encoded
from tests.live.server import START_SECONDS, Server, copy_model, write_model
from tests.live.small_vision_model import prepare_small_vision_model
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures"
BODY = "x" * (5 << 20)
CALLS, WARM_UP = 12, 4
MOST_MIB = 20  # The bodies of all calls together have 60 MiB.

Call = Callable[[Server], object]
CHAT: dict[str, Any] = {"model": "text", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "user": BODY}
SLOW = {"return_token_ids": True}  # Because of this field, vLLM's front end answers the call.
TEXT: dict[str, Any] = {"inputs": "Once", "parameters": {"max_new_tokens": 2}, "pad": BODY}
VISION = {"rolling_batch": "vllm", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}
ENDLESS = {"max_tokens": 60000, "ignore_eos": True, "stream": True}


def post(path: str, document: object, status: int = 200, **headers: str) -> Call:
    body = json.dumps(document).encode()

    def call(server: Server) -> None:
        sent = {"content-type": "application/json", **headers}
        response = server.client.post(path, content=body, headers=sent)
        assert response.status_code == status, response.text[:500]

    return call


def leave(path: str, document: object) -> Call:
    """Return a call whose client leaves in the middle of the stream."""

    def call(server: Server) -> None:
        connection = server.send(path, document)
        assert connection.recv(100)
        connection.close()
        wait_until(lambda: server.metric("slipway_open_requests") == 0)

    return call


def leave_body(server: Server) -> None:
    """Call the server, and leave in the middle of the body."""
    head = b"POST /models/text/invoke HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + BODY.encode())


def picture() -> str:
    """Return a picture of several megabytes, as a data URL."""
    return data_url(encoded(64, 64) + b"\0" * (3 << 20))


def chat_of_pictures() -> dict[str, Any]:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": picture()}}]
    return {"model": "vision", "messages": [{"role": "user", "content": content}], "max_tokens": 2}


PATHS: dict[str, Call] = {
    "custom handler": post("/models/custom/invoke", {"pad": BODY}),
    "LMI": post("/models/text/invoke", TEXT),
    "LMI, stream": post("/models/text/invoke", {**TEXT, "stream": True}),
    "LMI, too long": post("/models/text/invoke", {"inputs": BODY}, 424),
    "LMI, no such session": post("/models/text/invoke", TEXT, 424, **{"x-amzn-sagemaker-session-id": "none"}),
    "LMI, left": leave("/models/text/invoke", {**TEXT, "parameters": {"max_new_tokens": 60000}, "stream": True}),
    "left in the middle of the body": leave_body,
    "chat": post("/v1/chat/completions?model_name=text", CHAT),
    "chat, vLLM's way": post("/v1/chat/completions?model_name=text", {**CHAT, **SLOW}),
    "chat, vLLM's way, left": leave("/v1/chat/completions?model_name=text", {**CHAT, **SLOW, **ENDLESS}),
    "chat, refused": post("/v1/chat/completions?model_name=text", {**CHAT, **SLOW, "temperature": -1}, 400),
    "LMI, explained": post("/models/text/invoke", TEXT, **{"x-slipway-explain": "1"}),
    "chat, explained": post("/v1/chat/completions?model_name=text", CHAT, **{"x-slipway-explain": "1"}),
    "chat, vLLM's way, explained": post(
        "/v1/chat/completions?model_name=text", {**CHAT, **SLOW}, **{"x-slipway-explain": "1"}
    ),
    "chat with a picture": post("/v1/chat/completions?model_name=vision", chat_of_pictures()),
    "message": post(
        "/v1/messages?model_name=text", {**CHAT, "system": "x" * 1000, "metadata": {"user_id": BODY}, "user": None}
    ),
    "response": post(
        "/v1/responses?model_name=text", {"model": "text", "input": "Hi", "max_output_tokens": 2, "user": BODY}
    ),
}


@pytest.fixture(scope="module")
def uncollected(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server that never collects reference cycles."""
    directory = tmp_path_factory.mktemp("uncollected")
    models = {
        "text": write_model(directory / "text", **small_options, enable_stateful_sessions="true"),
        "custom": copy_model(FIXTURES / "handlers" / "echo", directory / "custom"),
        "vision": write_model(directory / "vision", **VISION, model_id=prepare_small_vision_model()),
    }
    environment, program = {"SAGEMAKER_MULTI_MODEL": "true"}, ("tests.live.uncollected", "serve")
    with Server(None, directory / "server.log", environment, program=program, name=None) as server:
        server.client.timeout = httpx.Timeout(START_SECONDS)
        for name, model in models.items():
            answer = server.client.post("/models", json={"model_name": name, "url": str(model)})
            assert answer.status_code == 200, answer.text
        server.give_way()
        yield server


def resident_mib(server: Server) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss) >> 20


@pytest.mark.parametrize("path", PATHS)
def test_calls_with_large_bodies_leave_nothing(uncollected: Server, path: str) -> None:
    call = PATHS[path]
    for _ in range(WARM_UP):
        call(uncollected)
    before = resident_mib(uncollected)
    for _ in range(CALLS):
        call(uncollected)
    wait_until(
        lambda: resident_mib(uncollected) <= before + MOST_MIB,
        about=lambda: f"{before} MiB became {resident_mib(uncollected)}",
    )
