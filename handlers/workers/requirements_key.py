"""What tells one environment for a model's requirements from another."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_WORD = re.compile(r"[^\s=@]+")
_FORMAT = "1"


def requirements_key(model_dir: Path, interpreter: Iterable[str]) -> str:
    """A name for the environment: it changes with the interpreter, the requirements, and every local file they name."""
    digest = hashlib.sha256(_FORMAT.encode())
    for text in interpreter:
        digest.update(text.encode() + b"\0")
    for path in sorted(_files(model_dir)):
        digest.update(str(path.relative_to(model_dir)).encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _files(model_dir: Path) -> set[Path]:
    """The requirements, the folder of wheels, and whatever in the model's folder the requirements name."""
    seen: set[Path] = set()
    pending = [model_dir / "requirements.txt", model_dir / "requirements"]
    while pending:
        for path in _all_in(pending.pop()):
            if path in seen:
                continue
            seen.add(path)
            if path.suffix == ".txt":
                pending += _named_in(path, model_dir)
    return seen


def _named_in(requirements: Path, model_dir: Path) -> Iterator[Path]:
    for word in _WORD.findall(requirements.read_text("utf-8", "replace")):
        path = (requirements.parent / word.partition("[")[0].removeprefix("file:")).resolve()
        if path != model_dir.resolve() and path.is_relative_to(model_dir.resolve()) and _exists(path):
            yield model_dir / path.relative_to(model_dir.resolve())


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a URL, say, that is too long for a file's name
        return False


def _all_in(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file())
