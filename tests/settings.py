"""Settings of a test, from an environment that is a plain dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from container.settings import load
from container.settings.environment import read_environment
from container.settings.settings import Settings
from container.settings.values import Value


def load_settings(
    model_dir: Path | str | Value | None,
    environ: Mapping[str, str],
    command_line: Mapping[str, str] | None = None,
    *,
    one_model: bool = False,
) -> Settings:
    return load.load_settings(model_dir, replace(read_environment(environ), one_model=one_model), command_line)


def further_settings(
    url: Value, name: str, environ: Mapping[str, str], arguments: Mapping[str, Value] | None = None
) -> Settings:
    return load.further_settings(url, name, read_environment(environ), {}, arguments)
