"""Where vLLM's processes have the sockets over which they talk.

vLLM makes them in the system's directory for temporary files, and leaves some there for good.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

_VARIABLE = "VLLM_RPC_BASE_PATH"
_LONGEST = 107
"""Bytes of a socket's path on Linux (unix(7))."""
_NAME = 37
"""Bytes of the names that vLLM gives them: a slash and a UUID."""


@contextlib.contextmanager
def socket_directory() -> Iterator[None]:
    """Give vLLM a directory of its own meanwhile, where nobody has named one and the path is not too long for that."""
    if _VARIABLE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="slipway-", ignore_cleanup_errors=True) as directory:
        if len(os.fsencode(directory)) + _NAME <= _LONGEST:
            os.environ[_VARIABLE] = directory
        try:
            yield
        finally:
            os.environ.pop(_VARIABLE, None)
