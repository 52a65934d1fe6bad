"""The environment of a `make` command that a test starts."""

from __future__ import annotations

import os


def without_make() -> dict[str, str]:
    """Return this process's environment without the variables that `make` passes to a nested `make`."""
    return {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
