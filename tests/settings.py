"""Settings for tests, from an environment that is a plain dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from container.settings import load
from container.settings.environment import read_environment
from container.settings.settings import Settings
from container.settings.values import Value
from handlers.model_config import GROUPS, ModelConfig


def load_settings(
    model_dir: Path | str | Value | None,
    environ: Mapping[str, str],
    command_line: Mapping[str, str] | None = None,
    *,
    gpus: int | None = None,
    one_model: bool = False,
) -> Settings:
    return load.load_settings(model_dir, replace(read_environment(environ, gpus), one_model=one_model), command_line)


def further_settings(
    url: Value, name: str, environ: Mapping[str, str], arguments: Mapping[str, Value] | None = None
) -> Settings:
    return load.further_settings(url, name, read_environment(environ), {}, arguments)


def configured(config: ModelConfig, **values: Any) -> ModelConfig:
    """Return a model's settings with other values. A contract's settings are set in the contract's group."""
    for name, group in GROUPS.items():
        own = {key: values.pop(key) for key in [field.name for field in fields(group)] if key in values}
        config = replace(config, **{name: replace(getattr(config, name), **own)})  # type: ignore[arg-type]
    return replace(config, **values)
