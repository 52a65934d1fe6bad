"""Stops a server while clients have streams, and checks that its processes end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.live.server import START_SECONDS, Server, records
from tests.live.small_model import ENDLESS, ENDLESS_STREAM
from tests.waiting import wait_until

STOPPING = "the server is stopping; the request was not completed"
_TOKENS = 20  # The length of an answer that has time to finish.


def open_stream(server: Server, parameters: dict[str, Any] = ENDLESS) -> socket.socket:
    """Return a client that has requested a stream without an end."""
    body = {"inputs": "Once upon a time", "stream": True, "parameters": parameters}
    return server.send(f"/predictions/{server.name}", body)


def drain(server: Server, number: signal.Signals = signal.SIGTERM) -> None:
    """Stop the server with a signal, and assert that it drains.

    Requests that are running finish, or end with an error that states the reason. New requests are refused. The process
    ends without an error. The signal goes to the whole process group, as Ctrl-C in a terminal does.
    """
    parameters = {"max_new_tokens": _TOKENS, "ignore_eos_token": True}
    body = {"inputs": "Once", "stream": True, "parameters": parameters}
    with ThreadPoolExecutor(1) as pool, server.client.stream("POST", "/invocations", json=body) as running:
        lines = running.iter_lines()
        first = next(lines)
        endless = pool.submit(server.client.post, "/v1/completions", json=ENDLESS_STREAM)
        wait_until(lambda: server.metric("slipway_engine_running") > 1)
        os.killpg(server.process.pid, number)
        wait_until(lambda: server.ping() == 503)
        with httpx.Client(base_url=server.url, timeout=START_SECONDS) as late:
            refused = late.post("/invocations", json={"inputs": "x"})
            assert (refused.status_code, late.get("/ping").status_code) == (503, 503)
            assert "retry-after" in refused.headers
        stream = records("\n".join([first, *lines]))
        assert len(stream) == _TOKENS
        assert "generated_text" in stream[-1]
        *_, last, done = endless.result().text.strip().split("\n\n")
        assert (json.loads(last.removeprefix("data: "))["error"]["message"], done) == (STOPPING, "data: [DONE]")
    assert server.process.wait(60) == 0
    assert not re.search("Traceback|EngineDeadError|ERROR", server.log_text())
