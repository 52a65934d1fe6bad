"""Servers that are forked with their modules imported."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from container.gpus import gpu_count
from tests.live.preloaded import ForkedProgram
from tests.live.server import Server

_NO_MODEL = {"SAGEMAKER_MULTI_MODEL": "true"}


@pytest.mark.skipif(gpu_count() > 0, reason="on a GPU nothing is forked")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_forked_server_serves_and_ends_with_its_exit_code(tmp_path: Path, number: signal.Signals, code: int) -> None:
    server = Server(None, tmp_path / "log", _NO_MODEL, name=None)
    try:
        server.wait_until_ready()
        assert isinstance(server.process, ForkedProgram)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.1)
        server.process.send_signal(number)
        assert server.process.wait(60) == code
        assert server.process.poll() == server.process.returncode == code
    finally:
        server.stop()


@pytest.mark.parametrize("variables", [{"HF_HOME": "/tmp"}, {"HF_HUB_OFFLINE": "0"}])
def test_a_server_with_variables_that_an_import_reads_is_started_as_by_users(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    server = Server(None, tmp_path / "log", _NO_MODEL | variables, name=None)
    try:
        assert isinstance(server.process, subprocess.Popen)
    finally:
        server.process.kill()
        server.stop()
