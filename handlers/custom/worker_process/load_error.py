"""The error of a handler that cannot be loaded, and its text."""

from __future__ import annotations

import os
import traceback


class LoadError(Exception):
    """The handler cannot be loaded. The message is for the handler's author."""


def describe_error(error: BaseException, directory: str) -> str:
    """Return the error's type and text, and the file and line in `directory` that raised it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text  # The text already has the file and the line.
    folder = os.path.realpath(directory)
    places = [(os.path.realpath(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(os.path.relpath(file, folder), line) for file, line in places if file.startswith(folder + os.sep)]
    return f"{text} ({own[-1][0]}, line {own[-1][1]})" if own else text
