"""Which files of a copy are whole: a line for each, so that a crash at any moment loses one file at most."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from container.sources.remote_file import RemoteFile


class Journal:
    """A file of JSON lines; the last one for a path counts. Whoever writes holds the lock of what it is about."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._appending = threading.Lock()

    def read(self) -> dict[str, RemoteFile]:
        """The files by their paths; a line that a crash has torn is none."""
        try:
            text = self._path.read_text("utf-8", "replace")
        except FileNotFoundError:
            return {}
        entries = (_entry(line) for line in text.splitlines())
        return {entry.path: entry for entry in entries if entry is not None}

    def add(self, file: RemoteFile) -> None:
        """Record one more file."""
        with self._appending, self._path.open("a", encoding="utf-8") as journal:
            journal.write(_line(file))

    def replace(self, files: Iterable[RemoteFile]) -> None:
        """Record these and no others, at once or not at all."""
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text("".join(map(_line, files)), "utf-8")
        partial.replace(self._path)


def _line(file: RemoteFile) -> str:
    return json.dumps([file.path, file.size, file.version]) + "\n"


def _entry(line: str) -> RemoteFile | None:
    try:
        match json.loads(line):
            case [str(path), int(size), str(version)]:
                return RemoteFile(path, size, version)
    except ValueError:
        pass
    return None
