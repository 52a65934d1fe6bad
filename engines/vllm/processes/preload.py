"""The fork server's preparation (`fork_server`): it imports vLLM once, for all of vLLM's processes.

Importing this module has effects and takes seconds. Only the fork server imports it.

A fork copies one thread only, and a CUDA context not at all. So nothing here may start a thread or initialize CUDA;
where something does, the process says so and ends, and vLLM's processes are spawned.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from engines.vllm.processes.fork_server import MUST_NOT_FORK, end_with_parent

PROCESS = os.getpid()  # The fork server's id, by which its children know their parent.

_ANY_DEVICE = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.coordinator",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
)
# transformers imports scikit-learn and with it pandas and pyarrow, if they are installed. pyarrow's jemalloc starts a
# thread. It is prepared for forks (pthread_atfork).
_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
# On a GPU the worker's modules are left to the worker: some look at the GPU when they are imported.
_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.llama")


def _share_openmp() -> bool:
    """Load torch's OpenMP before anything else, for all to see, as vLLM does for its CPU workers with LD_PRELOAD.

    With a second OpenMP in the process, threads that are bound to processors share one processor. Returns True if torch
    has its own copy.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    package = Path(torch.origin).parent
    for directory in (package.parent / "torch.libs", package / "lib"):
        for library in sorted(directory.glob("libgomp*.so*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def _unsafe_threads() -> list[str]:
    """Return the names of the threads that a fork would lose."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # It has ended.
            if int(task.name) != PROCESS:
                names.append((task / "comm").read_text().strip())
    return [name for name in names if name not in _SAFE_THREADS]


def _import_vllm(openmp: bool) -> str:
    """Import vLLM. Return why this process must not be forked afterwards, "" if it may."""
    try:
        for name in _ANY_DEVICE:
            importlib.import_module(name)
        from vllm.platforms import current_platform
        from vllm.utils.system_utils import set_process_title

        if current_platform.is_cpu():
            if not openmp:
                return "torch has no copy of libgomp, whose threads could be bound to processors"
            for name in _CPU:
                importlib.import_module(name)
        # A process finds the room for its title beside the environment that it was started with, once.
        set_process_title("ForkServer")
    except Exception as error:  # the server's import of vLLM reports the same to the client that asked for the model
        return f"importing vLLM failed: {error}"
    import torch

    if torch.cuda.is_initialized():
        return "importing vLLM initializes CUDA"
    if threads := _unsafe_threads():
        return f"importing vLLM starts {len(threads)} threads: {', '.join(threads)}"
    child = os.fork()
    if not child:
        os._exit(torch.cuda._is_in_bad_fork())  # only a fork shows that the driver was called before it
    _, status = os.waitpid(child, 0)
    return "importing vLLM calls the CUDA driver" if status else ""


gc.disable()  # collections find nothing in an import, and take a quarter of its time
os.setpgid(0, 0)  # Ctrl-C is for the server; it ends this process in its own time
end_with_parent()
if problem := _import_vllm(_share_openmp()):
    print(f"vLLM's processes are not forked, and take longer to start: {problem}", file=sys.stderr, flush=True)
    os._exit(MUST_NOT_FORK)
sys.stdout.flush()  # each child would write the buffer again
sys.stderr.flush()
gc.freeze()  # children share the present memory; a collection in one of them would copy it
gc.enable()
