"""Shows which parsers for tool calls and for reasoning the models of a server use, and why."""

from __future__ import annotations

from dataclasses import replace

from container.settings.lookup import DEFAULT, SettingEntry
from container.settings.settings import Settings, Startup
from engines.settings.declaration import PREFIX
from engines.vllm.parsers.choice import GENERATION, NAMES, NONE, parser_of


def with_parsers_shown(startup: Startup) -> Startup:
    """Return the settings with report entries for the parsers of each model.

    A model without local files is looked up on the hub. A model that computes vectors or scores, or that does not run
    on vLLM, gets no entries.
    """
    models = [replace(model, settings=_with_entries(model.settings)) for model in startup.models]
    return replace(startup, models=tuple(models))


def _with_entries(settings: Settings) -> Settings:
    config = settings.config
    if not config.runs_on_vllm or config.task not in GENERATION:
        return settings
    sources = {entry.name: entry.source for entry in settings.entries}
    found = []
    for kind in NAMES:
        name, choice = f"{PREFIX}{kind}", parser_of(kind, config)
        found.append(SettingEntry(name, choice.parser or NONE, sources.get(name, DEFAULT), choice.reason))
    names = [entry.name for entry in found]
    others = [entry for entry in settings.entries if entry.name not in names]
    return replace(settings, entries=(*others, *found))
