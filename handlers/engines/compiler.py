"""The C++ compiler that torch.compile needs on a CPU, which a machine that serves may not have."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

_SWITCH = "TORCH_COMPILE_DISABLE"
_COMPILER = "g++"
_INSTALLS_ONE = "TORCH_INDUCTOR_INSTALL_GXX"


def go_without_compiler(environ: MutableMapping[str, str]) -> bool:
    """Have torch compile nothing where there is no compiler; returns whether that was done.

    vLLM's sampler calls torch.compile at the first log probability, also when it runs the model eagerly, and its
    process dies where that fails. torch reads the variable when it is imported, so it is for processes that are still
    to be started. One that is set already stays as it is.
    """
    compiler = environ.get("CXX", _COMPILER)  # as torch looks for it
    if _SWITCH in environ or environ.get(_INSTALLS_ONE) or shutil.which(compiler, path=environ.get("PATH", os.defpath)):
        return False
    environ[_SWITCH] = "1"
    logger.info("there is no C++ compiler (%s), so torch.compile is off (%s=1)", compiler, _SWITCH)
    return True
