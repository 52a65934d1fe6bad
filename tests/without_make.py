"""The environment for a `make` that a test starts."""

from __future__ import annotations

import os


def without_make() -> dict[str, str]:
    """This process's environment, without the variables by which a make that runs the tests directs those below it."""
    return {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
