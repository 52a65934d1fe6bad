"""Counts calls of Python functions. This measure of work is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def python_calls(function: Callable[[], object]) -> int:
    """Return the number of Python functions that a function calls, including the function itself.

    Its exceptions propagate.
    """
    count = 0

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
