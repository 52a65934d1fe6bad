"""Prepares the fork server (`fork_server`): imports vLLM once for all of vLLM's processes.

The import of this module has side effects and takes seconds. Only the fork server imports it.

A fork copies only one thread, and no CUDA context. So nothing here may start a thread or initialize CUDA. If an import
does so, the fork server logs the reason and ends. Then vLLM's processes are spawned.
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

PROCESS = os.getpid()  # The fork server's process id. A child compares it with the id of its parent.

_ANY_DEVICE = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.coordinator",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
)
# If scikit-learn is installed, transformers imports it, and with it pandas and pyarrow. pyarrow's jemalloc starts a
# thread, but it handles forks (pthread_atfork).
_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
# The modules of a worker on a CPU. On a GPU, only the worker imports such modules, because some access the GPU.
_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.llama")


def _share_openmp() -> bool:
    """Load torch's OpenMP library first and globally, as vLLM does with LD_PRELOAD for its CPU workers.

    With a second OpenMP library in the process, all bound threads would share one processor. Returns True if torch has
    its own copy of the library.
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
        with contextlib.suppress(OSError):  # The thread has ended.
            if int(task.name) != PROCESS:
                names.append((task / "comm").read_text().strip())
    return [name for name in names if name not in _SAFE_THREADS]


def _import_vllm(openmp: bool) -> str:
    """Import vLLM. Return the reason why this process must not be forked afterwards; "" if it may be forked."""
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
        # setproctitle writes titles over the initial arguments and the environment behind them. Only its first call
        # looks for this memory, and starts at the initial environment. So this call must come before children replace
        # their environment (`apply_environment`).
        set_process_title("ForkServer")
    except Exception as error:  # The server's own import fails as well, and its client gets the error.
        return f"importing vLLM failed: {error}"
    import torch

    if torch.cuda.is_initialized():
        return "importing vLLM initializes CUDA"
    if threads := _unsafe_threads():
        return f"importing vLLM starts {len(threads)} threads: {', '.join(threads)}"
    child = os.fork()
    if not child:
        os._exit(torch.cuda._is_in_bad_fork())  # Only a fork can show that the driver was called before.
    _, status = os.waitpid(child, 0)
    return "importing vLLM calls the CUDA driver" if status else ""


gc.disable()  # Collections find nothing during an import, and take a quarter of its time.
os.setpgid(0, 0)  # Ctrl-C must reach only the server, which ends this process later.
end_with_parent()
if problem := _import_vllm(_share_openmp()):
    print(f"vLLM's processes are not forked, and take longer to start: {problem}", file=sys.stderr, flush=True)
    os._exit(MUST_NOT_FORK)
sys.stdout.flush()  # Otherwise each child would write the buffer again.
sys.stderr.flush()
gc.freeze()  # Children share this memory. A collection in a child would copy it.
gc.enable()
