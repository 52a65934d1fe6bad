"""`make run` as a user types it, without the tests' settings.

In one test, the server may use the whole machine. In the others, the server has less memory than the machine. The
other live tests set the size of the KV cache by hand. Here, Slipway has to find it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
import psutil
import pytest

from container.gpus import gpu_count
from engines.vllm import RELEASE
from tests.live.page_commands import Command, commands, is_shown, printed
from tests.live.server import START_SECONDS, free_port
from tests.waiting import SECONDS, wait_until
from tests.without_make import without_make

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
MEMINFO = Path("/sys/devices/system/node/node0/meminfo")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
GIB = 1 << 30
MOST_LINES = 25  # The maximum number of lines that a first start logs.
CURL = "curl --silent --show-error --fail-with-body "
OF_THE_TESTS = ("HF_HUB_OFFLINE", "HF_MODEL_ID")
THREADS_OF_THE_TESTS = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


def command(port: int) -> str:
    """Return the `make run` command for a shell, with the tests' interpreter and code."""
    variables = f"BIN={Path(sys.executable).parent}", f"PORT={port}"
    make = ["make", "--dry-run", "--no-print-directory", "run", *variables]
    recipe = subprocess.run(make, cwd=REPOSITORY, env=without_make(), capture_output=True, text=True, check=True).stdout
    return recipe[recipe.index("HF_MODEL_ID=") :]


@dataclass
class MakeRun:
    """A server that `make run` started."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, what: str) -> str:
        """Return the first line of the log that contains `what`. Wait for such a line if needed."""
        wait_until(lambda: what in self.text() or self.process.poll() is not None, START_SECONDS, about=self.text)
        lines = [line for line in self.text().splitlines() if what in line]
        assert lines, f"the log has no {what!r}:\n{self.text()[-4000:]}"
        return lines[0]

    def answer(self) -> str:
        """Wait until the server is ready, and return a generated text."""
        self.wait_for("is ready after")
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
        reply = httpx.post(f"http://127.0.0.1:{self.port}/invocations", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["generated_text"]
        return text


@contextlib.contextmanager
def make_run(directory: Path, *before: str) -> Iterator[MakeRun]:
    """Start `make run`. `before`: shell commands that run first and affect the server.

    Without such commands, vLLM chooses the cores of its threads. One test of this is enough, because these threads spin
    on cores that other tests use.
    """
    port = free_port()
    left_out = OF_THE_TESTS if before else OF_THE_TESTS + THREADS_OF_THE_TESTS
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": str(REPOSITORY), "SERVING_DRAIN_TIMEOUT": "600"}
    script = "\n".join(["set -e", *before, command(port)])
    log = directory / "server.log"
    with log.open("wb") as file:
        shell = ["unshare", "--mount", "sh", "-c", script] if before else ["sh", "-c", script]
        process = subprocess.Popen(shell, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield MakeRun(port, process, log)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        shell = psutil.Process(process.pid)
        started = [shell, *shell.children(recursive=True)]
        for server in (one for one in started if "serve" in one.cmdline()):
            server.terminate()
        _, left = psutil.wait_procs(started, timeout=60)
        for one in left:
            one.kill()
    process.wait(60)


@pytest.fixture(scope="module")
def mount_namespace() -> None:
    """Skip the test if a process cannot get a private mount namespace, or if the KV cache is not in main memory."""
    if gpu_count():
        pytest.skip("the KV cache is on the GPU")
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, of util-linux")
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs a mount namespace of its own: {tried.stderr.strip()}")


@pytest.fixture
def control_group(mount_namespace: None) -> Iterator[Path]:
    """Create a control group with 3 GiB of memory. Skip the test if this is not possible."""
    first = CONTROL_GROUPS / "memory" if (CONTROL_GROUPS / "memory").is_dir() else CONTROL_GROUPS
    group = first / f"slipway-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs to make a memory control group: {error}")
    try:
        name = "memory.limit_in_bytes" if first.name == "memory" else "memory.max"
        try:
            (group / name).write_text(str(3 * GIB))
        except OSError as error:
            pytest.skip(f"needs the memory controller in {first}: {error}")
        yield group
    finally:
        group.rmdir()


def quick_start() -> list[Command]:
    """Return the commands in README's quick start. They call the server."""
    return commands((REPOSITORY / "README.md").read_text().partition("## Quick start")[2].partition("\n## ")[0])


def test_make_run_answers_what_the_readme_asks(tmp_path: Path) -> None:
    with make_run(tmp_path) as server:
        assert server.answer()
        address = f"http://127.0.0.1:{server.port}"
        banner = server.wait_for(f"Slipway {version('slipway')} serves model (vLLM {RELEASE}.")
        assert banner.endswith(f") at {address}")
        assert f"{address}/console" in server.wait_for("console: ")
        assert f"{address}/docs" in server.wait_for("API docs: ")
        start = server.text().partition("API docs: ")[0].splitlines()
        assert len([line for line in start if "still loading after" not in line]) < MOST_LINES
        assert shutil.which("curl"), "README's commands need curl"
        asking = quick_start()
        assert len(asking) > 5
        for command in asking:
            text = command.text.replace("curl ", CURL).replace(".venv/bin/python", sys.executable)
            output = printed(command._replace(text=text), server.port, REPOSITORY, os.environ)
            assert is_shown(command.output or "", output), f"{text}\n{output}"
        if not gpu_count():
            assert "option.kv_cache_memory_bytes sets it by hand" in server.wait_for("KV cache: ")
        # make sends SIGTERM to the recipe's shell, but not to the shell's child processes.
        server.process.terminate()
        assert server.process.wait(SECONDS) == 0
        assert "drained" in server.text()


@pytest.mark.long
def test_make_run_answers_in_a_container_of_3_gib(control_group: Path, tmp_path: Path) -> None:
    """As in a container, the group's directory is the only visible control group."""
    enter = f"echo $$ > {shlex.quote(str(control_group / 'cgroup.procs'))}"
    hide = f"mount --bind {shlex.quote(str(control_group))} {shlex.quote(str(control_group.parent))}"
    with make_run(tmp_path, enter, hide) as server:
        assert server.answer()
        assert "the control group / has " in server.wait_for("KV cache: ")


def meminfo(free: int) -> str:
    """Return the meminfo of this machine's node, with this number of free bytes.

    The file cache holds no memory that could be freed.
    """
    lines = []
    for line in MEMINFO.read_text().splitlines():
        _, _, name, *_ = line.split()
        replaced = {
            "MemTotal:": 4 * GIB,
            "MemFree:": free,
            "Active(file):": 0,
            "Inactive(file):": 0,
            "SReclaimable:": 0,
        }
        lines.append(f"Node 0 {name} {replaced[name] // 1024} kB" if name in replaced else line)
    return "\n".join(lines) + "\n"


@pytest.mark.long
@pytest.mark.usefixtures("mount_namespace")
def test_make_run_answers_where_the_node_has_little_and_less_still_when_vllm_looks(tmp_path: Path) -> None:
    if not MEMINFO.is_file() or "0" not in nodes_of_this_process():
        pytest.skip("needs a NUMA node 0 to run on")
    node = tmp_path / "meminfo"
    node.write_text(meminfo(int(2.2 * GIB)))
    with make_run(tmp_path, f"mount --bind {shlex.quote(str(node))} {MEMINFO}") as server:
        assert "NUMA node0 has 2.20 GiB of 4.00 GiB available" in server.wait_for("KV cache: ")
        node.write_text(meminfo(GIB // 4))
        refused = server.wait_for("trying once more with a KV cache of 0.1")
        assert "Available memory on node 0 (0.25/4.0 GiB) on kv cache allocation is less than" in refused
        assert server.answer()


def nodes_of_this_process() -> str:
    status = Path("/proc/self/status").read_text()
    return status.partition("Mems_allowed_list:")[2].split()[0]
