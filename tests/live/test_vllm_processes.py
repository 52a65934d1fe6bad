"""The start and the end of vLLM's processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from tests.live.draining import drain
from tests.live.server import Server, hosted, serving, write_model


def titled(server: Server, title: str) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if title in " ".join(child.cmdline()))


@pytest.mark.slow
def test_vllms_processes_are_forked_from_one_that_imported_it_and_an_unloaded_model_leaves_none(
    host: Server, tmp_path: Path, small_options: dict[str, object]
) -> None:
    with hosted(host, write_model(tmp_path / "model", **small_options)) as server:
        fork_server, engine, worker = [titled(server, name) for name in ("ForkServer", "EngineCore", "Worker")]
        assert fork_server.ppid() == server.process.pid
        assert (engine.ppid(), worker.ppid()) == (fork_server.pid, fork_server.pid)
        assert os.getpgid(engine.pid) not in (os.getpgid(server.process.pid), os.getpgid(fork_server.pid))

        bound = re.search(r"local_rank=0, core ids=\[(\d+)", server.log_text())
        assert bound is not None
        assert worker.cpu_affinity() == [int(bound[1])]  # as vLLM says
        assert engine.cpu_affinity() == psutil.Process(server.process.pid).cpu_affinity()

        metrics = server.client.get("/metrics").text
        phases = dict(re.findall(r'slipway_startup_seconds\{model="[^"]+",phase="([\w ]+)"\} (\S+)', metrics))
        assert list(phases) == ["import", "engine", "front end", "first token"]
        server.wait_for_log(" is ready after ")
        ready = re.search(r"is ready after ([\d.]+) s: import [\d.]+ s, .*first token [\d.]+ s", server.log_text())
        assert ready is not None
        assert sum(map(float, phases.values())) <= float(ready[1]) + 0.1

        os.kill(worker.pid, signal.SIGSTOP)  # a stopped worker cannot react to the end of its model
        assert server.client.delete(f"/models/{server.name}").status_code == 200
        worker.wait(60)
        assert not engine.is_running()
        assert fork_server.is_running()


def test_a_worker_that_starts_after_the_kill_of_its_engine_ends_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.vllm.processes import contexts, fork_server

    class Exited(Exception):
        pass

    def leave(_code: int) -> NoReturn:
        raise Exited

    with subprocess.Popen(["true"]) as engine:
        engine.wait()
    monkeypatch.setattr(fork_server, "is_forked", lambda: True)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: engine)
    monkeypatch.setattr(os, "_exit", leave)
    reader, report = multiprocessing.Pipe(duplex=False)
    with reader, report, pytest.raises(Exited):
        contexts.prepare_worker(report)


@pytest.mark.long
def test_processes_are_spawned_where_the_environment_asks_for_it_and_drain_as_well(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "SERVING_DRAIN_TIMEOUT": "10"}
    with serving(tmp_path, environment, **small_options) as server:
        engine, worker = titled(server, "EngineCore"), titled(server, "Worker")
        assert (engine.ppid(), worker.ppid()) == (server.process.pid, engine.pid)
        drain(server)
