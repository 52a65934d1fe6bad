"""A cluster that Ray's own commands start. On it, `serve deploy` and `serve run` do what docs/ray.md says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from tests.live.server import START_SECONDS, copy_model, free_port
from tests.waiting import wait_until

pytest.importorskip("ray.serve", reason="Ray is not installed")
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SECONDS = 300.0


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Start a cluster, and yield its environment variables. Its token belongs to this test alone."""
    own = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # the paths of Ray's sockets have to be short
    (own / "token").write_text("0123456789abcdef" * 4)
    dashboard = free_port()
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(own / "token"),
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT),
    }
    head = ["ray", "start", "--head", f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--temp-dir={own}"]
    run([*head, "--num-cpus=4"], environment)
    try:
        yield environment
    finally:
        run(["ray", "stop", "--force"], environment)
        shutil.rmtree(own, ignore_errors=True)


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run a program from the directory of this Python, and return its output."""
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def serves(url: str, replicas: int) -> bool:
    """Return True if this number of replicas are ready."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=START_SECONDS).text
    except httpx.TransportError:
        return replicas == 0
    return len(re.findall(r'^slipway_ready{replica="\w+"} 1', text, re.MULTILINE)) == replicas


def test_serve_deploy_takes_what_slipway_ray_prints_and_changes_it_in_place(
    environment: dict[str, str], tmp_path: Path
) -> None:
    model = copy_model(ROOT / "tests" / "fixtures" / "handlers" / "echo", tmp_path / "echo")
    url, file = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "serve.yaml"
    options = ["--model-dir", str(model), "--port", str(port), "--cpus", "0.1", "-e", "SERVING_LOG_LEVEL=warning"]
    for count in (1, 2):
        file.write_text(run(["slipway", "ray", *options, "--replicas", str(count), "--print-config"], environment))
        assert yaml.safe_load(file.read_text())["applications"][0]["args"]["replicas"] == count
        run(["serve", "deploy", str(file)], environment)
        wait_until(partial(serves, url, count), SECONDS, about=lambda: run(["serve", "status"], environment))
        assert httpx.post(f"{url}/invocations", content=b"echo", timeout=START_SECONDS).content == b"echo"
    run(["serve", "shutdown", "--yes"], environment)
    wait_until(partial(serves, url, 0), SECONDS)
