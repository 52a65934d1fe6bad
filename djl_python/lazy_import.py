"""Imports of packages that only some methods need.

A handler may run under an interpreter that has none of them, so such a package is imported when the method is called.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def require(module: str, purpose: str, package: str | None = None) -> Any:
    """The module, imported now. Raises ImportError: it is not installed; the message names the package, and `purpose`
    as what needs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if error.name != root:
            raise
        name = package or root
        raise ImportError(f"{purpose} needs the package {name}, which {sys.executable} does not have") from error
