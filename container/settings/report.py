"""Shows the effective settings, their sources and the GPU plan, for `slipway config`.

Credentials are masked.
"""

from __future__ import annotations

import json
from typing import Any

from container.models.placement import GpuPlan
from container.settings.lookup import SettingEntry
from container.settings.settings import ServerReport, Startup
from container.settings.values import masked
from engines.settings.parsers import Scalar

_HEAD = ("setting", "value", "source")


def startup_text(startup: Startup, plan: GpuPlan) -> str:
    """Return a table of all settings, and the GPU plan.

    If the server does not have exactly one model, the server and each model have their own tables.
    """
    warning = (f"warning: {plan.warning}",) if plan.warning else ()
    plan_lines = [_one_line(line) for line in (*plan.lines, *warning)]
    if startup.report is None:
        return "\n".join([render_text(startup.models[0].settings), *plan_lines])
    parts = [render_text(startup.report)]
    parts += [f"model {m.title} ({_one_line(m.url)})\n{render_text(m.settings)}" for m in startup.models]
    return "\n\n".join([*parts, "\n".join(plan_lines)])


def startup_json(startup: Startup, plan: GpuPlan) -> str:
    """Return the content of `startup_text` as JSON. The field `gpus` contains the plan.

    If the server does not have exactly one model, the form is `{"server": {...}, "models": {"<name>": {...}}}`.
    """
    if startup.report is None:
        content = report_object(startup.models[0].settings)
    else:
        models = {model.title: report_object(model.settings) for model in startup.models}
        content = {"server": report_object(startup.report), "models": models}
    content["gpus"] = _plan_object(plan)
    return json.dumps(content, indent=2, ensure_ascii=False)


def _plan_object(plan: GpuPlan) -> dict[str, Any]:
    return {
        "memory_bytes": list(plan.gpus),
        "models": [
            {
                "name": use.model,
                "gpus": use.gpus,
                "copies": use.copies,
                "gpus_of_copy": use.gpus_of_copy,
                "kv_cache_tokens_of_copy": use.cache_tokens,
                "why": use.why,
                "to_use_idle": use.remedies(plan.idle or 0),
            }
            for use in plan.models
        ],
        "idle": plan.idle,
        "warning": plan.warning or None,
    }


def render_text(report: ServerReport) -> str:
    """Return a table of names, values and sources, followed by the aliases and the warnings."""
    rows = [_HEAD, *(_row(entry) for entry in report.entries)]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name:{name_width}}  {value:{value_width}}  {source}" for name, value, source in rows]
    lines += [f"alias: {alias.variable} ({alias.of}) stands for {alias.target}" for alias in report.aliases]
    lines += [f"warning: {_one_line(warning)}" for warning in report.warnings]
    return "\n".join(lines)


def report_object(report: ServerReport) -> dict[str, Any]:
    """Return the settings, aliases and warnings as data."""
    return {
        "settings": [_object(entry) for entry in report.entries],
        "aliases": [{"variable": alias.variable, "of": alias.of, "setting": alias.target} for alias in report.aliases],
        "warnings": list(report.warnings),
    }


def _row(entry: SettingEntry) -> tuple[str, str, str]:
    note = f" ({entry.note})" if entry.note else ""
    return entry.name, _one_line(_text(_shown(entry))), entry.source + note


def _object(entry: SettingEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": entry.name, "value": _shown(entry), "source": entry.source}
    return fields | {"note": entry.note} if entry.note else fields


def _shown(entry: SettingEntry) -> Scalar | None:
    return masked(entry.name, entry.value) if isinstance(entry.value, str) else entry.value


def _text(value: Scalar | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value < 1e5 else str(value)


def _one_line(text: str) -> str:
    """Escape unprintable characters, because they could break the table or control the terminal."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
