"""The one place that rules the garbage collector: around imports, after a model is loaded, and after one is gone.

A whole collection holds up all threads, the event loop with every stream among them. With vLLM imported it would look
through a million objects, for half a second on an idle machine and for several on a busy one; a loaded model is about
15,000 of them. Objects made by imports live as long as the process. They are exempt from collection (`gc.freeze`).
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

# Requests leave no reference cycles behind, except for small ones of chats, so there is little to look for.
_THRESHOLDS = (20_000, 50, 50)

_collecting = threading.Lock()
_loaded = False  # Objects of a model were loaded into this process.
_models_exempt = False  # Some of them are exempt as well, because something was imported after that.


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Switch automatic collections off during imports, in which they find nothing, and exempt the new objects.

    Collections take a quarter of the import of vLLM.
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
        gc.enable()  # last: it may collect at once


def collect_after_load(*, model_is_here: bool) -> None:
    """Collect what loading has left behind; further automatic collections are rare.

    Args:
        model_is_here: Its objects are in this process.
    """
    global _loaded
    with _collecting:
        gc.collect()
        gc.set_threshold(*_THRESHOLDS)
        _loaded |= model_is_here


def release_memory() -> None:
    """Collect garbage, including unloaded models, and return the memory to the system and the GPUs.

    The free memory decides which models still fit.
    """
    with _collecting:
        if _models_exempt:
            gc.unfreeze()
        gc.collect()
        if _models_exempt:
            gc.freeze()
    cuda = sys.modules.get("torch.cuda")
    is_initialized = getattr(cuda, "is_initialized", None)  # Missing while another thread imports PyTorch.
    if cuda is not None and is_initialized is not None and is_initialized():
        try:
            cuda.empty_cache()  # PyTorch keeps the memory of GPUs for its next model.
        except RuntimeError as error:  # The GPU is lost.
            logger.warning("the free memory of the GPUs cannot be given back: %s", error)
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep less
    if malloc_trim is not None:
        malloc_trim(0)
