"""The permissions of the sample model. Every user may read it, for example in a container that mounts it."""

from __future__ import annotations

from pathlib import Path

from container.sources.sample_model import make_once


def modes(directory: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in (directory, *sorted(directory.iterdir()))]


def write(directory: Path) -> None:
    for name, mode in (("config.json", 0o644), ("model.safetensors", 0o600)):
        (directory / name).write_text("{}")
        (directory / name).chmod(mode)


def test_every_user_can_read_what_was_made(tmp_path: Path) -> None:
    assert modes(make_once(tmp_path / "model", write)) == [0o755, 0o644, 0o644]
