"""Runs the rows of `cases/*.yaml`: settings of a user, and their effect. UPDATE_CASES=1 writes the effects.

A user sets lines of serving.properties, variables, and options of the command line. A row may name the files of the
model directory. By default, there is only `config.json`. The effect consists of notes, warnings, variables for
libraries, and all fields that differ from their defaults. If the settings are invalid, it consists of the problems.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from container.settings.environment import read_environment
from container.settings.server import ServerConfig
from container.settings.settings import SettingsError
from handlers.custom.settings import HandlerConfig
from handlers.model_config import ModelConfig
from tests.rows import read_rows, write_rows
from tests.settings import load_settings

FILES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))
assert FILES
GIVEN = ("properties", "environ", "command_line", "files", "gpus", "one_model")
STATED = ("model", "server", "exports", "notes", "warnings", "problems")
NO_HANDLER = HandlerConfig(entry_point="")


def difference(value: Any, default: Any) -> Any:
    """Return the fields of a dataclass that differ from those of another one, as plain data."""
    if is_dataclass(value) and not isinstance(value, type):
        default = NO_HANDLER if default is None else default
        pairs = {field.name: (getattr(value, field.name), getattr(default, field.name)) for field in fields(value)}
        return {name: difference(*pair) for name, pair in pairs.items() if pair[0] != pair[1]}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | frozenset):
        return sorted(value) if isinstance(value, frozenset) else list(value)
    return str(value) if isinstance(value, Path) else value


def effect(case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the effect of a row."""
    for name, text in case.get("files", {"config.json": "{}"}).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    lines = case.get("properties", [])
    text = lines if isinstance(lines, str) else "\n".join(lines)
    (directory / "serving.properties").write_text(text.replace("<model>", str(directory)))
    environ = {name: text.replace("<model>", str(directory)) for name, text in case.get("environ", {}).items()}
    alone = case.get("one_model", False)
    try:
        settings = load_settings(
            directory, environ, case.get("command_line"), gpus=case.get("gpus", 0), one_model=alone
        )
    except SettingsError as error:
        return {"problems": list(error.problems)}
    names = [entry.name for entry in settings.entries if not entry.note.startswith("ignored")]
    assert len(names) == len(set(names))
    default = ModelConfig(name=directory.name, model_dir=directory, model_id=str(directory))
    given = {
        "model": difference(settings.config, default),
        "server": difference(settings.server_config, ServerConfig()),
        "exports": read_environment(environ, 0).exports,
        "notes": {
            entry.name: entry.note for entry in settings.entries if entry.note not in ("", "the model directory")
        },
        "warnings": list(settings.warnings),
    }
    return {name: found for name, found in given.items() if found}


def without_place(found: Any, place: str) -> Any:
    """Return an effect with `<model>` in place of the path of the model directory."""
    if isinstance(found, str):
        return found.replace(place, "<model>")
    if isinstance(found, dict):
        return {name: without_place(value, place) for name, value in found.items()}
    return [without_place(value, place) for value in found] if isinstance(found, list) else found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_have_the_effect_of_the_case(path: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    updating = "UPDATE_CASES" in os.environ
    rows_by_title = read_rows(path)
    for number, (title, rows) in enumerate(rows_by_title.items()):
        for place, row in enumerate(rows):
            directory = tmp_path / f"{number}-{place}" / "model"
            directory.mkdir(parents=True)
            with subtests.test(title, row=place + 1):
                assert row.keys() - {*GIVEN, *STATED} == set()
                given = {name: row[name] for name in GIVEN if name in row}
                rows[place] = given | without_place(effect(row, directory), str(directory))
                assert updating or rows[place] == row
    if updating:
        write_rows(path, rows_by_title)
