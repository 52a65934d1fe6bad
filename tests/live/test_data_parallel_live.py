"""Two replicas of a model with vLLM's data parallelism: their metrics are added up, and they end with the server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.live.continued_calls import PLAIN, STEPPED, answers, kill
from tests.live.draining import open_stream
from tests.live.server import METRIC_SECONDS, Server, serving
from tests.waiting import lives, wait_until

BATCH = 4
"""The number of sequences that run at the same time on each replica."""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("replicas")
    options = small_options | {"max_rolling_batch_size": BATCH, "data_parallel_size": 2, **STEPPED}
    # The two replicas share the machine's cores.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "SERVING_ENGINE_RESTART": "3"}
    with serving(directory, environment, **options) as server:
        yield server


@pytest.mark.slow
def test_the_gauges_are_those_of_all_replicas_together(replicas: Server) -> None:
    clients = 5 * BATCH
    with contextlib.ExitStack() as streams:
        for _ in range(clients):
            streams.enter_context(open_stream(replicas))

        def all_counted() -> bool:
            running, waiting = (replicas.metric(f"slipway_engine_{kind}") for kind in ("running", "waiting"))
            # vLLM distributes the requests. If more requests run than fit on one replica, both replicas run some.
            return running > BATCH and running + waiting == clients

        wait_until(all_counted, METRIC_SECONDS, about=lambda: replicas.log_text()[-2000:])
        text = replicas.client.get("/metrics").text
        running = re.findall(r'^vllm:num_requests_running{engine="(.)",model_name="model"} (.+)$', text, re.MULTILINE)
        assert [(engine, 0 < float(count) <= BATCH) for engine, count in running] == [("0", True), ("1", True)]
    for gauge in ("slipway_engine_running", "slipway_engine_waiting"):
        replicas.wait_for_metric(gauge, 0)


@pytest.mark.long
def test_the_calls_of_all_replicas_continue_when_one_of_them_dies(replicas: Server) -> None:
    undisturbed = answers(replicas, PLAIN)
    before = replicas.metric("slipway_continued_calls_total")
    second = replicas.engine_processes()[1].pid
    assert answers(replicas, PLAIN, lambda: kill(replicas, BATCH + 1, second)) == undisturbed
    assert replicas.metric("slipway_continued_calls_total") - before > BATCH
    assert replicas.metric("slipway_engine_restarts_total") == 1
    assert answers(replicas, PLAIN) == undisturbed


def test_neither_replicas_nor_their_coordinator_outlive_a_server_that_is_killed(replicas: Server) -> None:
    children = replicas.children()
    names = [child.name() for child in children]
    assert sum("EngineCor" in name for name in names) == 2
    coordinator = next(child for child, name in zip(children, names, strict=True) if "DPCoordin" in name)
    os.kill(coordinator.pid, signal.SIGSTOP)  # a stopped process cannot notice that the server has ended
    replicas.process.kill()
    replicas.process.wait(60)
    wait_until(lambda: not any(map(lives, children)), about=lambda: list(filter(lives, children)))
