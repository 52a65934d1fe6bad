"""`kill -9` while calls run. The calls of a killed engine continue. A killed server leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from tests.gpu.conftest import LONG, ON_CPU, RecordProperty, used_gpu_memory
from tests.live.continued_calls import kill, pause
from tests.live.draining import open_stream
from tests.live.server import METRIC_SECONDS, START_SECONDS, Server, records
from tests.waiting import wait_until

CALLS = 4 if ON_CPU else 12
FREED_MIB = 1024
"""The allowed difference of the GPU's used memory before and after a server, in MiB. Other programs may use the GPU."""


def test_a_client_that_leaves_ends_its_generation(server: Server) -> None:
    aborted = server.metric("slipway_generations_aborted_total")
    with open_stream(server) as client:
        assert client.recv(64).startswith(b"HTTP/1.1 200")
    server.wait_for_metric("slipway_engine_running", 0)
    server.wait_for_metric("slipway_generations_aborted_total", aborted + 1)


def test_streams_of_a_killed_engine_get_all_their_tokens(server: Server, record_property: RecordProperty) -> None:
    """In 16-bit types, the rest of a text may differ after a restart. The tests of copies compare texts in fp32."""

    def stream(number: int) -> list[dict[str, Any]]:
        parameters = {"max_new_tokens": LONG, "ignore_eos_token": True}
        body: dict[str, Any] = {"inputs": f"{number}: once", "stream": True, "parameters": parameters}
        if number % 2:
            body["adapters"] = "red"
        return records(server.client.post("/invocations", json=body, timeout=START_SECONDS).text)

    before = server.metric("slipway_continued_calls_total")
    with ThreadPoolExecutor(CALLS) as pool:
        pause(server)  # No stream ends before the server has all of them.
        running = [pool.submit(stream, number) for number in range(CALLS)]
        server.wait_for_metric("slipway_open_requests", CALLS)
        kill(server, CALLS)
        streams = [call.result() for call in running]
    for lines in streams:
        assert len(lines) == LONG, lines[-1]
        assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]
    assert server.metric("slipway_continued_calls_total") > before
    assert server.ping() == 200
    record_property("the engine was down for", f"{server.metric('slipway_engine_down_seconds_total'):.1f} s")


def test_a_killed_server_leaves_no_process_and_no_memory_of_the_gpu(server: Server, used_without_server: int) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    with open_stream(server):
        server.wait_for_metric("slipway_engine_running", 1)
        server.process.kill()
        server.process.wait(60)
    _, left = psutil.wait_procs(children, timeout=METRIC_SECONDS)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
    wait_until(
        lambda: used_gpu_memory() <= used_without_server + FREED_MIB,
        METRIC_SECONDS,
        about=lambda: f"{used_gpu_memory()} MiB are in use; {used_without_server} were without the server",
    )
