"""The files of a model that is somewhere else: which are fetched, and which of them before the settings are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from container.sources.source_error import SourceError

WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".tar", ".gz", ".tgz", ".zip"}
)
"""Endings of what no setting is read from."""
SMALL = 32 << 20
"""Bytes up to which any other file is fetched before the settings are read."""

# Other forms of the weights that a directory has as *.safetensors; an engine loads the latter.
_DUPLICATES = frozenset({".bin", ".pt", ".pth", ".h5", ".msgpack", ".ckpt"})
_ORIGINAL = "original"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its source lists it."""

    path: str
    """Below the model's directory, with `/` between its parts."""
    size: int
    """Bytes."""
    version: str
    """Changes whenever the content does."""

    @property
    def is_weights(self) -> bool:
        """Whether it can wait until the settings are read."""
        return self.size > SMALL or PurePosixPath(self.path).suffix.lower() in WEIGHTS


def check_path(path: str) -> str:
    """A path that stays in the directory that it is put into.

    Raises:
        SourceError: it does not, or no file can be called so.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise SourceError(f"{path!a} cannot be the path of a file below the model's directory")
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        raise SourceError(f"{path[:80]!a}... is too long for the name of a file")
    return path


def selected(files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
    """What is fetched: all, save for weights that are there as *.safetensors as well, in the order of their paths.

    Raises:
        SourceError: no directory can hold all of them.
    """
    everything = _without_markers(sorted(files, key=lambda file: file.path))
    safe = {str(PurePosixPath(file.path).parent) for file in everything if file.path.endswith(".safetensors")}
    return tuple(file for file in everything if not _is_duplicate(PurePosixPath(file.path), safe))


def _without_markers(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """S3 may have an object `a` beside an object `a/b`; a disk may not. An empty one only stands for the folder."""
    folders = {str(parent) for file in files for parent in PurePosixPath(file.path).parents}
    if both := [file.path for file in files if file.path in folders and file.size]:
        raise SourceError(f"{both[0]!a} is an object, and the folder of others: no directory can hold both")
    return [file for file in files if file.path not in folders]


def _is_duplicate(path: PurePosixPath, safe: set[str]) -> bool:
    if path.suffix.lower() in _DUPLICATES and str(path.parent) in safe:
        return True
    return any(parent.name == _ORIGINAL and str(parent.parent) in safe for parent in path.parents if parent.name)
