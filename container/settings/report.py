"""Shows the effective settings and where each comes from: `slipway config`."""

from __future__ import annotations

import json
import os
from typing import Any

from container.devices import gpu_count
from container.settings.parsers import Scalar
from container.settings.properties import masked
from container.settings.settings import ServerReport, SettingEntry, Settings, Startup
from handlers.engines.choice import is_vllm
from handlers.engines.cpu_memory import CacheSize, planned_size
from handlers.engines.protocol import EngineOutOfMemory

_HEAD = ("setting", "value", "source")


def startup_text(startup: Startup) -> str:
    """The table of the one model's settings, or one of the server's and one of each model's."""
    if startup.report is None:
        return _model_text(startup.models[0].settings)
    parts = [render_text(startup.report)]
    parts += [f"model {m.title} ({_one_line(m.url)})\n{_model_text(m.settings)}" for m in startup.models]
    return "\n\n".join(parts)


def startup_json(startup: Startup) -> str:
    """The same as JSON; where there is not one model, `{"server": {...}, "models": {"<name>": {...}}}`."""
    if startup.report is None:
        return json.dumps(_model_report(startup.models[0].settings), indent=2, ensure_ascii=False)
    models = {model.title: _model_report(model.settings) for model in startup.models}
    return json.dumps({"server": _report(startup.report), "models": models}, indent=2, ensure_ascii=False)


def render_text(settings: Settings | ServerReport) -> str:
    """A table of name, value and source, then the aliases and the warnings; credentials are masked."""
    rows = [_HEAD, *(_row(entry) for entry in settings.entries)]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name:{name_width}}  {value:{value_width}}  {source}" for name, value, source in rows]
    lines += [f"alias: {one.alias.variable} ({one.alias.of}) is {one.alias.key}" for one in settings.aliases]
    lines += [f"warning: {_one_line(warning)}" for warning in settings.warnings]
    return "\n".join(lines)


def render_json(settings: Settings | ServerReport) -> str:
    """Settings (name, value, source, a note), aliases (variable, of, setting), warnings; secrets are masked."""
    return json.dumps(_report(settings), indent=2, ensure_ascii=False)


def _model_text(settings: Settings) -> str:
    chosen = _kv_cache(settings)
    return render_text(settings) if chosen is None else f"{render_text(settings)}\nKV cache: {_one_line(str(chosen))}"


def _model_report(settings: Settings) -> dict[str, Any]:
    """`kv_cache` has the size that would be chosen now; `bytes` and `limit` are null where memory is too small."""
    chosen = _kv_cache(settings)
    if chosen is None:
        return _report(settings)
    size, limit = (chosen.bytes, chosen.limit) if isinstance(chosen, CacheSize) else (None, None)
    return _report(settings) | {"kv_cache": {"bytes": size, "limit": limit, "text": str(chosen)}}


def _kv_cache(settings: Settings) -> CacheSize | EngineOutOfMemory | None:
    """What vLLM's KV cache would be on a CPU; None for another engine, on a GPU, or where its size is set by hand."""
    if gpu_count() or not is_vllm(settings.model):
        return None
    try:
        return planned_size(settings.model, os.environ)
    except EngineOutOfMemory as error:
        return error


def _report(settings: Settings | ServerReport) -> dict[str, Any]:
    return {
        "settings": [_object(entry) for entry in settings.entries],
        "aliases": [
            {"variable": one.alias.variable, "of": one.alias.of, "setting": one.alias.key} for one in settings.aliases
        ],
        "warnings": list(settings.warnings),
    }


def _row(entry: SettingEntry) -> tuple[str, str, str]:
    note = f" ({entry.note})" if entry.note else ""
    return entry.name, _one_line(_text(_shown(entry))), entry.source + note


def _shown(entry: SettingEntry) -> Scalar | None:
    return masked(entry.name, entry.value) if isinstance(entry.value, str) else entry.value


def _text(value: Scalar | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value < 1e5 else str(value)


def _one_line(text: str) -> str:
    """Unprintable characters as escapes, so that no value breaks the table or steers a terminal."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _object(entry: SettingEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": entry.name, "value": _shown(entry), "source": entry.source}
    return fields | {"note": entry.note} if entry.note else fields
