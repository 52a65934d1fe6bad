"""Controls the garbage collector: during imports, after a model is loaded, and after a model is unloaded.

A full collection stops all threads, including the event loop with every stream. After the import of vLLM, it would scan
a million objects. That takes half a second on an idle machine, and several seconds on a busy machine. Imported objects
live as long as the process, so they are exempt from collection (`gc.freeze`). A loaded model adds only about 15,000
objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

# Requests leave only a few small reference cycles behind, from chats. So collections can be rare.
_THRESHOLDS = (20_000, 50, 50)

_collecting = threading.Lock()
_loaded = False  # Whether a model was loaded into this process.
# Whether `gc.freeze` after an import has also exempted a loaded model's objects from collection.
_models_exempt = False


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Switch automatic collections off during imports, and then exempt the new objects from collection.

    Collections would find nothing, and would take a quarter of vLLM's import time.
    """
    global _models_exempt
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            with _collecting:
                gc.freeze()
                _models_exempt |= _loaded
        gc.enable()  # Called last, because a collection may follow at once.


def collect_after_load(*, model_is_here: bool) -> None:
    """Collect the garbage of loading, and make automatic collections rare.

    Args:
        model_is_here: Whether the model's objects are in this process.
    """
    global _loaded
    with _collecting:
        gc.collect()
        gc.set_threshold(*_THRESHOLDS)
        _loaded |= model_is_here


def release_memory() -> None:
    """Collect garbage, including unloaded models, and return the memory to the system and the GPUs.

    The amount of free memory decides which other models fit.
    """
    with _collecting:
        if _models_exempt:
            gc.unfreeze()
        gc.collect()
        if _models_exempt:
            gc.freeze()
    cuda = sys.modules.get("torch.cuda")
    # The function is missing while another thread imports PyTorch.
    is_initialized = getattr(cuda, "is_initialized", None)
    if cuda is not None and is_initialized is not None and is_initialized():
        try:
            cuda.empty_cache()  # PyTorch keeps freed GPU memory for its own use.
        except RuntimeError as error:  # The GPU is lost.
            logger.warning("the free memory of the GPUs cannot be given back: %s", error)
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Only in glibc, which keeps the most freed memory.
    if malloc_trim is not None:
        malloc_trim(0)
