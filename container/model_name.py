"""Which model it is, and what it is called (contracts/lmi.md 2.5 and 2.6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from container import model_location as location
from container import options, server_options
from container.masking import quoted
from container.remote_models import SourceError, is_s3
from container.resolution import DEFAULT, Resolution, SettingEntry
from container.setting_sources import Sources

_MODEL_ID = options.BY_KEY["option.model_id"]


def set_model(sources: Sources, fields: dict[str, Any], found: Resolution, *, required: bool) -> None:
    """Turn option.model_id, or what stands in for it, into what is loaded; and name it.

    `required`: an engine has to have a model; a custom handler may bring its own, and makes of a value that names
    nothing here what it likes.
    """
    if "model_id" not in fields:
        fields["model_id"] = found.take(_MODEL_ID, sources.model, sources.variables)
    given = sources.model.get("option.model_id")
    variable = sources.variables.get("HF_MODEL_ID")
    if given is None and variable is not None and location.is_store_of(variable.text, (sources.model_dir,)):
        variable = None  # the same model, by the directory around it
    by_variable = given is None and variable is not None
    if given is not None and variable is not None and not _same_or_opened(given.text, variable.text, sources):
        found.ignore("HF_MODEL_ID", variable, f"one model is served, that of {given.source}")
    _set_revision(sources, fields, by_variable, found)
    value = given or variable
    if value is None:
        _set_own_model(sources.model_dir, fields, found, required)
    elif fields["model_id"] is not None:
        try:
            fields["model_id"] = _resolved(fields["model_id"], sources)
        except (location.ModelNotFound, SourceError) as error:
            if required or isinstance(error, SourceError):
                found.problems.append(f"option.model_id is {quoted('', value.text)} ({value.source}): {error}")
    fields["name"] = found.take(server_options.MODEL_NAME_OPTION, sources.server)
    if fields["name"] is None and fields["model_id"] is not None:
        fields["name"] = location.model_name(fields["model_id"], sources.model_dir, by_variable)
        found.entries.append(SettingEntry("model_name", fields["name"], DEFAULT))


def _same_or_opened(given: str, variable: str, sources: Sources) -> bool:
    """Whether HF_MODEL_ID says the same, or is the directory that the other was read from."""
    return given.strip() == variable.strip() or sources.remote_models.has(variable)


def _resolved(text: str, sources: Sources) -> str:
    if is_s3(text):
        return str(sources.remote_models.open(text))
    return location.resolve_model_id(text, sources.model_dir)


def _set_revision(sources: Sources, fields: dict[str, Any], by_variable: bool, found: Resolution) -> None:
    """HF_REVISION belongs to HF_MODEL_ID (lmi.md 2.5); beside another model it would name the wrong commit."""
    revision = sources.variables.get("HF_REVISION")
    if revision is None or "option.revision" in sources.model:
        return
    if not by_variable:
        found.ignore("HF_REVISION", revision, "it goes with HF_MODEL_ID; use option.revision")
        return
    fields["revision"] = revision.text.strip()
    found.replace(SettingEntry("option.revision", fields["revision"], revision.source))


def _set_own_model(model_dir: Path, fields: dict[str, Any], found: Resolution, required: bool) -> None:
    if required and not location.has_model(model_dir):
        found.problems.append(
            f"there is no model: give option.model_id in serving.properties or HF_MODEL_ID in the environment, or put "
            f"the model with its {location.CONFIG_FILE} into the model directory ({model_dir})"
        )
        return
    fields["model_id"] = str(model_dir)
    found.replace(SettingEntry("option.model_id", str(model_dir), DEFAULT, "the model directory"))
