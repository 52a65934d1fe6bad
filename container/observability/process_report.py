"""The processes of a server: their state, their memory, and the stacks of their threads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engines.stacks import Stack, own_stacks, stacks_of

STACK_SECONDS = 2.0  # The usual time limit for all processes to write their stacks.
_MOST_PROCESSES = 256
_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})
_OF_VLLM = "VLLM::"  # The titles of vLLM's processes begin with this.
_FORK_SERVER = "VLLM::ForkServer"  # The process that forks vLLM's other processes, which inherit this title at first.
_STARTING = "VLLM::Starting"
_VLLM = "/vllm/"  # The path of each file of vLLM contains this.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """A process of the server at one moment."""

    pid: int
    parent: int | None = None
    name: str
    state: str
    threads: int = 0
    memory_bytes: int = 0  # The size of the process in main memory.
    cpu_seconds: float = 0.0
    stacks: Sequence[Stack] = ()  # The main thread first. Empty if the process has not written its stacks.
    waits_in: str = ""  # The kernel function in which the main thread waits, if the kernel reveals it.

    @property
    def title(self) -> str:
        return f"process {self.pid} ({self.name})"

    @property
    def is_vllms(self) -> bool:
        return self.name.startswith(_OF_VLLM) and self.name != _FORK_SERVER

    @property
    def place(self) -> str:
        """The main thread's innermost frame in vLLM's code, or its innermost frame if no frame is in vLLM's code.

        Empty if the stacks are unknown.
        """
        frames = self.stacks[0].frames if self.stacks else ()
        return next((frame for frame in frames if _VLLM in frame), next(iter(frames), ""))

    @property
    def fault(self) -> str:
        """The fault that the process's state or its missing stacks show. Empty if the process has no fault."""
        if self.state in _STOPPED:
            return f"{self.title} is stopped (SIGSTOP, or a debugger)"
        if self.state == psutil.STATUS_ZOMBIE:
            return f"{self.title} has ended"
        if self.state == psutil.STATUS_DISK_SLEEP:
            return f"{self.title} waits in the kernel" + (f", in {self.waits_in}" if self.waits_in else "")
        if self.is_vllms and not self.stacks:
            return f"{self.title} has not written its stacks in time"
        return ""

    def shown(self) -> dict[str, Any]:
        """Return the report as data for JSON."""
        shown = {
            "pid": self.pid,
            "parent": self.parent,
            "name": self.name,
            "state": self.state,
            "fault": self.fault or None,
            "threads": self.threads,
            "memory_bytes": self.memory_bytes,
            "cpu_seconds": round(self.cpu_seconds, 2),
            "waits_in": self.waits_in or None,
            "stacks": [stack.shown() for stack in self.stacks],
        }
        return {name: value for name, value in shown.items() if value is not None}


def process_reports(
    server: psutil.Process, names: Mapping[int, str], seconds: float = STACK_SECONDS
) -> list[ProcessReport]:
    """Return the reports of a server's process and its descendants.

    Args:
        server: The process of the server. It may be this process.
        names: The names of processes without a title, by process id.
        seconds: The time limit for all processes to write their stacks.
    """
    names = {server.pid: "the server", **names}
    processes = [server, *server.children(recursive=True)][:_MOST_PROCESSES]
    states = {process.pid: _state(process) for process in processes}
    asked = [pid for pid, state in states.items() if pid != os.getpid() and state not in _STOPPED]
    stacks = stacks_of(asked, seconds)
    if server.pid == os.getpid():
        stacks[server.pid] = own_stacks()
    reports = [_report(process, server.pid, names, stacks.get(process.pid, ())) for process in processes]
    return [report for report in reports if report is not None]


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return ""


def _report(
    process: psutil.Process, server: int, names: Mapping[int, str], stacks: Sequence[Stack]
) -> ProcessReport | None:
    """Return the report of a process, or None if it has ended."""
    try:
        with process.oneshot():
            parent, name = process.ppid(), names.get(process.pid) or _name(process)
            if name == _FORK_SERVER and parent != server:
                name = _STARTING
            return ProcessReport(
                pid=process.pid,
                parent=parent,
                name=name,
                state=str(process.status()),
                threads=process.num_threads(),
                memory_bytes=process.memory_info().rss,
                cpu_seconds=sum(process.cpu_times()[:2]),
                stacks=stacks,
                waits_in=_waits_in(process.pid),
            )
    except psutil.Error:
        return None


def _name(process: psutil.Process) -> str:
    """Return the title of a vLLM process, or the name of another process's program.

    The program's arguments are left out, because they may contain secrets.
    """
    title = " ".join(process.cmdline()[:1]) if process.status() != psutil.STATUS_ZOMBIE else ""
    return title if title.startswith(_OF_VLLM) else process.name()


def _waits_in(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""
    return "" if name == "0" else name
