"""The conditions under which vLLM's processes are forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
ROOT = Path(__file__).parents[5]
OWN_VARIABLES = ("VLLM_WORKER_MULTIPROC_METHOD", "OMP_NUM_THREADS")
"""Variables that a test sets itself."""
SCRIPT = """
import logging, multiprocessing
logging.basicConfig(format="%(message)s")
from engines.vllm.processes import fork_server
fork_server.start()
context = fork_server.context()
print(context.get_start_method() if context else "spawned")
"""
ENDED = """
import os
from multiprocessing import forkserver
os.waitid(os.P_PID, forkserver._forkserver._forkserver_pid, os.WEXITED | os.WNOWAIT)
fork_server.start()
"""
MODULES = (
    *("v1/engine/async_llm", "v1/engine/coordinator", "v1/engine/core"),
    *("v1/executor/multiproc_executor", "v1/executor/uniproc_executor", "platforms", "utils/system_utils"),
)
THREAD = """
import ctypes, threading, time
started = threading.Event()
def run():
    ctypes.CDLL(None).prctl(15, b"{name}")  # PR_SET_NAME
    started.set()
    time.sleep(60)
threading.Thread(target=run, daemon=True).start()
started.wait()
"""
GOOD = {
    "platforms": "class current_platform:\n    def is_cpu():\n        return False\n",
    "utils/system_utils": "def set_process_title(name):\n    pass\n",
}


def run(directory: Path, script: str, *arguments: str, **variables: str) -> tuple[str, str]:
    """Run a script that can import the packages of a directory. Return its output and its log."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    finished = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])} | variables,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return finished.stdout.strip(), finished.stderr


def outcome(directory: Path, engine_core: str, script: str = SCRIPT, **variables: str) -> tuple[str, str]:
    """Make a package `vllm` with this module. Return two texts: how vLLM's processes are started, and the log."""
    for module in MODULES:
        file = directory / "vllm" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in file.parents:
            if package == directory:
                break
            (package / "__init__.py").touch()
        file.write_text(GOOD.get(module, ""))
    (directory / "vllm" / "v1" / "engine" / "core.py").write_text(engine_core)
    return run(directory, script, **variables)


def test_processes_are_forked_where_importing_vllm_leaves_one_thread(tmp_path: Path) -> None:
    assert outcome(tmp_path, "")[0] == "forkserver"


def test_the_thread_of_pyarrows_allocator_is_no_obstacle(tmp_path: Path) -> None:
    assert outcome(tmp_path, THREAD.format(name="jemalloc_bg_thd"))[0] == "forkserver"


def test_a_fork_server_that_ended_before_the_engine_starts_is_not_started_again(tmp_path: Path) -> None:
    script = SCRIPT.replace("context =", ENDED + "context =")
    found, log = outcome(tmp_path, "raise RuntimeError('no such library')", script=script)
    assert found == "spawned"
    assert log.count("importing vLLM failed: no such library") == 1
    assert log.count("the fork server has ended") == 1


def test_files_of_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "torch.py").write_text("raise SystemExit(3)")
    script = f"import os; os.chdir({str(tmp_path / 'model')!r})\n{SCRIPT}"
    assert outcome(tmp_path, "", script=script, PYTHONSAFEPATH="1")[0] == "forkserver"


@pytest.mark.parametrize(
    ("engine_core", "said"),
    [
        (THREAD.format(name="allocator"), "importing vLLM starts 1 threads: allocator"),
        ("raise RuntimeError('no such library')", "importing vLLM failed: no such library"),
        ("import torch; torch.cuda._is_in_bad_fork = lambda: True", "importing vLLM calls the CUDA driver"),
    ],
)
def test_where_a_fork_would_not_be_safe_processes_are_spawned_and_the_log_says_why(
    tmp_path: Path, engine_core: str, said: str
) -> None:
    found, log = outcome(tmp_path, engine_core, script=SCRIPT + ENDED + "assert not fork_server.context()")
    assert found == "spawned"
    assert "vLLM's processes are not forked" in log
    assert log.count(said) == 1, "it is not tried again"


@pytest.mark.parametrize(
    "variables",
    [{"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, {"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"}, {"LD_PRELOAD": "libiomp5.so"}],
)
def test_the_environment_can_ask_for_spawned_processes(tmp_path: Path, variables: dict[str, str]) -> None:
    assert outcome(tmp_path, "", **variables)[0] == "spawned"


def test_a_fork_server_that_was_killed_is_noticed_and_started_again(tmp_path: Path) -> None:
    again = """
import os, signal
from multiprocessing import forkserver
killed = forkserver._forkserver._forkserver_pid
os.kill(killed, signal.SIGKILL)
os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
print("forked" if fork_server.context() else "spawned")
fork_server.start()
print("forked" if fork_server.context() else "spawned")
"""
    found, log = outcome(tmp_path, "", script=SCRIPT + again)
    assert found.split() == ["forkserver", "spawned", "forked"]
    assert "the fork server has ended" in log


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "compiled"), [("1", "0"), ("0", "1")])
def test_a_forked_process_compiles_nothing_where_its_environment_says_so(
    tmp_path: Path, switch: str, compiled: str
) -> None:
    script = """
import os, sys, torch, torch._dynamo
from engines.vllm.processes.fork_server import apply_environment
compiled = []
def backend(module, inputs):
    compiled.append(module)
    return module.forward
apply_environment(os.environ | {"TORCH_COMPILE_DISABLE": sys.argv[1]})
torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(1))
print(len(compiled))
"""
    assert run(tmp_path, script, switch)[0] == compiled


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_forked_processs_openmp_threads_are_bound_as_its_environment_says(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    script = """
import os, sys, torch
from engines.vllm.processes.fork_server import apply_environment
apply_environment(os.environ | {"OMP_NUM_THREADS": "2", "GOMP_CPU_AFFINITY": sys.argv[1]})
torch.rand(1000, 1000) @ torch.rand(1000, 1000)
affinities = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
print(os.sched_getaffinity(0), *sorted(map(str, (a for a in affinities if len(a) == 1))), sep=";")
"""
    found, _ = run(tmp_path, script, f"{first} {second}", OPENBLAS_NUM_THREADS="1")
    main, *bound = found.split(";")
    assert main == f"{{{first}}}"
    assert bound == sorted([f"{{{first}}}", f"{{{second}}}"])
