"""The reason why an engine could not start, and whether the reason is a lack of memory.

If memory is the reason, SageMaker unloads other models. So an error counts as a lack of memory in two cases only: its
type says so, or its text contains a known phrase of vLLM or PyTorch. vLLM's messages are in `v1/core/kv_cache_utils.py`
(in vLLM 0.33 `v1/core/kv_cache_planning.py`), `v1/worker/utils.py`, `gpu_model_runner.py` and `cpu_worker.py`. Of
an error in another process, vLLM's executor and engine manager pass on only the text.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from pydantic import ValidationError

from engines.interface import EngineOutOfMemory, EngineStartError

_SHOWN = 800  # The maximum number of characters of a message, which must fit into a pipe at once.
# The error classes of Python and PyTorch. They are listed by name, because PyTorch is not imported here.
_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})
_SIGNS = re.compile(
    r"No available memory for the cache blocks"
    r"|is needed, which is larger than the available KV cache memory"
    r"|is less than (the )?desired [CG]PU memory utilization"
    r"|exceed the desired GPU memory utilization"
    r"|is less than the engine's budget after excluding external process's weights"
    r"|on kv cache allocation is less than requested memory for kv"
    r"|(CUDA|HIP|XPU) out of memory|CUDA error: out of memory|DefaultCPUAllocator: can't allocate memory"
    r"|Cannot allocate memory \(os error 12\)"
)
# vLLM's advice if the KV cache is too small. It names command-line flags and a page of the documentation.
_ADVICE = re.compile(
    r"(?:Based on the available memory, the estimated maximum model length is (\d+)\. )?"
    r"Try increasing `gpu_memory_utilization`.*?for more details\.",
    re.DOTALL,
)
# Matches if vLLM's engine process got SIGKILL. The kernel kills a process this way when memory runs out.
_KILLED = re.compile(r"Engine core initialization failed\..*Failed core proc\(s\): \{[^}]*: -9\b", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StartFailure:
    """The failure of one process, with its own error message."""

    reason: str
    out_of_memory: bool

    def error(self, what: str) -> EngineStartError:
        kind = EngineOutOfMemory if self.out_of_memory else EngineStartError
        return kind(f"{what}: {self.reason}")


def failure_of(error: Exception) -> StartFailure:
    """Return the failure that an exception describes."""
    reason = _reason(error)[:_SHOWN] or type(error).__name__
    if _KILLED.search(reason):
        return StartFailure("its engine process was killed (SIGKILL), as the kernel does when memory runs out", True)
    by_type = any(kind.__name__ in _OUT_OF_MEMORY for kind in type(error).__mro__)
    by_number = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return StartFailure(reason, by_type or by_number or _SIGNS.search(reason) is not None)


def _reason(error: Exception) -> str:
    """Return the text of an error. For a pydantic error, leave out the arguments and links.

    vLLM's advice is replaced by the options that have the same effect.
    """
    if not isinstance(error, ValidationError):
        return _ADVICE.sub(_remedy, str(error))
    parts = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(": ".join([*map(str, part["loc"]), part["msg"].removeprefix("Value error, ")]) for part in parts)


def _remedy(advice: re.Match[str]) -> str:
    length = advice[1]
    shorter = f"Set option.max_model_len to {length} or less, or to -1, with which vLLM takes the longest that fits. "
    return (
        f"{shorter if length else ''}More memory for the KV cache comes with a higher option.gpu_memory_utilization, "
        "with more GPUs (option.tensor_parallel_degree) or with smaller weights (option.quantize)."
    )
