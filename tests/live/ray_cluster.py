"""A local Ray cluster that `slipway ray` starts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.live.server import Server, free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
START = 300.0
"""The time within which replicas start or stop even on a busy machine, in seconds."""


class Cluster(Server):
    """A local cluster with its replicas. A second `slipway ray` changes the model that the cluster serves."""

    deployed: Path | str | None = None
    """The directory of the last model that `deploy` has deployed. None before that."""

    def deploy(self, model_dir: Path, *arguments: str) -> None:
        """Deploy another model, and wait until it is served."""
        command = [sys.executable, "-m", "slipway", "ray", "--address", "auto", "--cpus", "0.1", *arguments]
        command += ["--model-dir", str(model_dir), "--model-name", "model"]
        command += ["--port", str(self.port), "--host", "127.0.0.1"]
        environment = os.environ | self.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START)
        assert done.returncode == 0, done.stdout + done.stderr
        self.deployed = model_dir

    def replace_replicas(self, model_dir: Path) -> None:
        """Deploy another model with two replicas, and wait until none of the earlier replicas serves."""
        old = self.replicas()
        self.deploy(model_dir, "--replicas", "2")
        wait_until(lambda: len(self.replicas() - old) == 2 and not self.replicas() & old, START)

    def requests(self, route: str = "/invocations") -> dict[str, float]:
        """Return the number of requests that each replica has answered with 200."""
        series = re.compile(rf'slipway_requests_total{{replica="(\w+)",route="{re.escape(route)}",status="200"}} (.+)')
        return {replica: float(count) for replica, count in series.findall(self.client.get("/metrics").text)}

    def each(self, name: str) -> dict[str, float]:
        """Return a metric of each replica."""
        found = re.findall(rf'^{name}{{.*replica="(\w+)".*}} (.+)$', self.client.get("/metrics").text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}

    def metric(self, name: str, model: str = "") -> float:
        """Return the sum of a metric of all replicas. They serve one model, so `model` has no effect."""
        return sum(self.each(name).values())

    def replicas(self) -> set[str]:
        """Return the names of the replicas that serve."""
        try:
            text = self.client.get("/metrics").text
        except httpx.TransportError:
            return set()
        return set(re.findall(r'slipway_ready{replica="(\w+)"} 1', text))

    def wait_for_replicas(self, count: int) -> set[str]:
        wait_until(
            lambda: len(self.replicas()) == count, START, about=lambda: (self.replicas(), self.log_text()[-4000:])
        )
        return self.replicas()

    def processes_of_replicas(self) -> set[int]:
        """Return the processes of this cluster's replicas."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = psutil.process_iter(["cmdline"])
        return {p.pid for p in found if p in children and "ServeReplica" in " ".join(p.info["cmdline"] or [])}

    def processes(self) -> dict[str, int]:
        """Return the process of each replica that runs, by its name in the log."""
        running = self.processes_of_replicas()
        named = re.findall(
            r"pid=(\d+)\).* INFO +(\w+) container\.models\.life_cycle: model model is ready", self.log_text()
        )
        return {name: int(pid) for pid, name in named if int(pid) in running}


@contextlib.contextmanager
def ray_cluster(model: Path, log: Path, *arguments: str) -> Iterator[Cluster]:
    """Start a cluster with two replicas of a model, and stop it at the end.

    Args:
        model: The model's directory.
        log: Gets the output of `slipway ray`.
        arguments: Further options of `slipway ray`.
    """
    own = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # The paths of Ray's sockets have to be short.
    environment = {
        "RAY_TMPDIR": str(own),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "SERVING_ENGINE_RESTART": "3",
        # Two engines run on the same cores.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    started = _start(model, log, environment, arguments)
    started.client.timeout = httpx.Timeout(START)  # Ray Serve holds requests back until a replica is ready.
    try:
        started.wait_for_replicas(2)
        yield started
    finally:
        started.stop()
        shutil.rmtree(own, ignore_errors=True)


def _start(model: Path, log: Path, environment: dict[str, str], arguments: tuple[str, ...]) -> Cluster:
    """Start the cluster. If the machine is so busy that Ray's processes miss their limit of 30 seconds, try again."""
    options = ("--replicas", "2", "--cpus", "0.1", *arguments)
    for _ in range(3):
        running = Cluster(model, log, environment, program=("slipway", "ray"), arguments=options)
        try:
            wait_until(lambda: "is served on" in running.log_text() or running.process.poll() is not None, START)  # noqa: B023
        finally:
            said = running.log_text()
            if ended := "is served on" not in said:
                running.stop()
        if not ended:
            return running
        assert "The current node timed out during startup" in said, said[-4000:]
    pytest.fail(said[-4000:])
