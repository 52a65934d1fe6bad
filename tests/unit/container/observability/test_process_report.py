"""The report of a process: its state, its fault and its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from container.observability.process_report import ProcessReport, process_reports
from engines.stacks import Stack
from tests.waiting import wait_until

STACKS = (Stack("MainThread", ('File "a.py", line 1 in f',)),)


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (ProcessReport(pid=7, name="n", state="stopped"), "process 7 (n) is stopped (SIGSTOP, or a debugger)"),
        (ProcessReport(pid=7, name="n", state="tracing-stop"), "process 7 (n) is stopped (SIGSTOP, or a debugger)"),
        (ProcessReport(pid=7, name="n", state="zombie"), "process 7 (n) has ended"),
        (ProcessReport(pid=7, name="n", state="disk-sleep"), "process 7 (n) waits in the kernel"),
        (ProcessReport(pid=7, name="n", state="disk-sleep", waits_in="f"), "process 7 (n) waits in the kernel, in f"),
        (
            ProcessReport(pid=7, name="VLLM::Worker", state="running"),
            "process 7 (VLLM::Worker) has not written its stacks in time",
        ),
        (ProcessReport(pid=7, name="VLLM::Worker", state="running", stacks=STACKS), ""),
        (ProcessReport(pid=7, name="VLLM::ForkServer", state="sleeping"), ""),
        (ProcessReport(pid=7, name="sh", state="sleeping"), ""),
    ],
)
def test_the_state_of_a_process_tells_its_fault(report: ProcessReport, fault: str) -> None:
    assert report.fault == fault


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started.pid
        started.kill()


def test_processes_below_the_server_are_reported_with_their_names(child: int) -> None:
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(child).status() == psutil.STATUS_STOPPED)
    with ThreadPoolExecutor(1) as pool:  # The thread that asks is not reported.
        reports = pool.submit(process_reports, psutil.Process(), {child: "m: worker 1"}).result()
    server, (below,) = reports[0], [report for report in reports if report.pid == child]
    assert (server.pid, server.name) == (os.getpid(), "the server")
    assert server.stacks[0].thread == "MainThread"
    assert (below.parent, below.name, below.state) == (os.getpid(), "m: worker 1", "stopped")
    assert below.memory_bytes > 0


def test_a_process_that_has_ended_is_named(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    (below,) = [report for report in process_reports(psutil.Process(), {}) if report.pid == child]
    assert below.fault.endswith("has ended")
