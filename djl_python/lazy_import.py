"""An import function for packages that only some methods need.

A handler's interpreter may not have these packages, so they are imported when such a method is called.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def require(module: str, purpose: str, package: str | None = None) -> Any:
    """Import a module and return it.

    Args:
        purpose: The feature that needs the module. The error message names it.
        package: The package's name, if it differs from the module's.

    Raises:
        ImportError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if error.name != root:
            raise
        name = package or root
        raise ImportError(f"{purpose} needs the package {name}, which {sys.executable} does not have") from error
