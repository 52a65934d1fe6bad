"""Small functions that LMI's handlers import from this module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class IdCounter:
    """Counts up from 0 and starts again at `MAX_ID`."""

    MAX_ID = 999999

    def __init__(self) -> None:
        self.id = 0

    def get_id(self) -> int:
        """The next number, which is not taken."""
        return self.id

    def next_id(self) -> int:
        """Takes the next number."""
        taken = self.id
        self.id = (taken + 1) % self.MAX_ID
        return taken

    def reset(self) -> None:
        """Starts again at 0."""
        self.id = 0


def find_model_file(model_dir: str, extensions: Iterable[str]) -> str | None:
    """The path of the one file with such an extension (given without its dot); None if there is none.

    Raises:
        ValueError: there are several.
    """
    suffixes = {f".{extension}" for extension in extensions}
    found = sorted(str(path) for path in Path(model_dir).glob("*") if path.suffix in suffixes)
    if len(found) > 1:
        raise ValueError(f"Multiple model files found in {model_dir}: {', '.join(found)}. Only one is supported")
    return found[0] if found else None


def is_best_of(parameters: Mapping[str, Any]) -> bool:
    """Whether the best of several sequences is requested."""
    return _above_one(parameters, "best_of")


def is_beam_search(parameters: Mapping[str, Any]) -> bool:
    """Whether beam search is requested."""
    return _above_one(parameters, "num_beams")


def is_multiple_sequences(parameters: Mapping[str, Any]) -> bool:
    """Whether several sequences are requested."""
    return _above_one(parameters, "n")


def is_streaming(parameters: Mapping[str, Any]) -> bool:
    """Whether token streaming is requested."""
    return bool(parameters.get("stream"))


def wait_till_generation_finished(parameters: Mapping[str, Any]) -> bool:
    """Whether no text can be sent before all sequences have finished."""
    return is_best_of(parameters) or is_multiple_sequences(parameters) or is_beam_search(parameters)


def _above_one(parameters: Mapping[str, Any], name: str) -> bool:
    return (parameters.get(name) or 1) > 1
