"""The settings of one server process, made of serving.properties, the environment and the command line.

`container.setting_sources` says what goes before what; `container.options` and `container.server_options` say what
there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from container import model_location as location
from container import options, server_options
from container.addresses import Address, AddressError
from container.leftovers import LEFTOVERS
from container.masking import HIDDEN, quoted
from container.option import Option
from container.properties import Value
from container.resolution import DEFAULT, Resolution, SettingEntry
from container.setting_sources import Sources, read_sources
from handlers.model_settings import ModelSettings

__all__ = ["ServerSettings", "SettingEntry", "Settings", "SettingsError", "load_settings"]

SAGEMAKER_METADATA = Path("/opt/ml/.sagemaker_infra/endpoint-metadata.json")
"""There on SageMaker only (lmi.md 2.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the process listens, queues, logs and ends. `container.server_options` says what each is."""

    host: str = "0.0.0.0"
    port: int = 8080
    job_queue_size: int = 1000
    max_request_size: int = 67108864
    """Bytes."""
    drain_timeout: float = 25.0
    """Seconds."""
    fail_fast: bool = False
    log_format: Literal["plain", "json"] = "plain"
    log_level: str = "info"
    log_prompts: bool = False
    request_id_header: str = "x-request-id"
    allow_multi_status: bool = False
    coalesce_above: int = 32
    cors_allowed_origin: str | None = None
    cors_allowed_methods: str | None = None
    cors_allowed_headers: str | None = None
    throttle_error_http_code: int = 503
    wlm_error_http_code: int = 503
    server_error_http_code: int = 500


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, with the record of where each came from."""

    server: ServerSettings
    model: ModelSettings
    entries: tuple[SettingEntry, ...] = ()
    warnings: tuple[str, ...] = ()


class SettingsError(Exception):
    """The settings cannot be used; `problems` names each one: the option, its source, its value, what is allowed."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_settings(
    model_dir: Path | None, environ: Mapping[str, str], command_line: Mapping[str, str] | None = None
) -> Settings:
    """Read and check all settings.

    `model_dir` is --model-dir; without it SERVING_MODEL_STORE counts, else /opt/ml/model. `command_line` holds server
    keys such as "port", "host", "model_name".

    Raises:
        SettingsError: something is wrong; all that is wrong is listed.
    """
    found = Resolution()
    sources = read_sources(model_dir, environ, command_line or {}, found)
    _refuse_modes(sources, found)
    server = _server_fields(sources, found)
    model = _model_fields(sources, found)
    if found.problems:
        raise SettingsError(tuple(dict.fromkeys(found.problems)))
    return Settings(
        ServerSettings(**server), ModelSettings(**model), tuple(found.entries), tuple(dict.fromkeys(found.warnings))
    )


def _refuse_modes(sources: Sources, found: Resolution) -> None:
    for name, what in (("SAGEMAKER_MULTI_MODEL", "several models"), ("SAGEMAKER_SECURE_MODE", "the secure mode")):
        value = sources.variables.get(name)
        if value is not None and value.text.strip().lower() == "true":
            found.problems.append(f"{name} is true ({value.source}): {what}: not served by this version of Slipway")
    if (file := location.custom_code(sources.model_dir)) is not None:
        found.problems.append(
            f"{file} is in the model directory: not served by this version of Slipway; "
            "custom handlers and formatters are not run: take the file out"
        )
    if os.path.isfile(sources.model_dir / "requirements.txt"):
        found.warnings.append("requirements.txt in the model directory is ignored: put its packages into the image")


def _server_fields(sources: Sources, found: Resolution) -> dict[str, Any]:
    layer = sources.server
    if "request_id_header_key" not in layer and os.path.exists(SAGEMAKER_METADATA):
        layer["request_id_header_key"] = Value("X-Amzn-SageMaker-Inference-Id", "default on SageMaker")
    fields = {option.field: found.take(option, layer) for option in server_options.SERVED if option.field}
    for option in (*server_options.NOT_SERVED, *server_options.LEFTOVERS):
        found.take(option, layer)
    _check_management(layer, fields, found)
    known = {option.key for option in server_options.SERVER_OPTIONS}
    known |= {server_options.MODEL_NAME_OPTION.key, *server_options.ADDRESS_KEYS}
    for key in sorted(layer.keys() - known):
        if layer[key].source.startswith("command line"):
            found.problems.append(f"{layer[key].source}: there is no such option")
        else:
            found.ignore(key, layer[key], "the server has no such setting")
    return fields


def _check_management(layer: Mapping[str, Value], fields: Mapping[str, Any], found: Resolution) -> None:
    """A listener of its own may be meant to hide the management API; serving it to all would undo that."""
    management = layer.get("management_address")
    if management is None or management.text == layer.get("inference_address", Value("", "")).text:
        return
    try:
        address = Address.parse(management)
    except AddressError as error:
        found.problems.append(str(error))
        return
    if (address.host, address.port) != (fields["host"], str(fields["port"])):
        found.problems.append(
            f"management_address is {quoted('', management.text)} ({management.source}): a second listener is not "
            f"served by this version of Slipway; leave it out (served: http://{fields['host']}:{fields['port']})"
        )


def _model_fields(sources: Sources, found: Resolution) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_dir": sources.model_dir, "engine_arguments": {}, "engine_argument_sources": {}}
    for option in options.SERVED:
        value = found.take(option, sources.model, sources.variables)
        if option.field is not None:
            fields[option.field] = value
        elif option.argument is not None and value is not None:
            _add_argument(fields, option.argument, str(value), _source(option, sources.model))
    for option in (*options.NOT_SERVED, *LEFTOVERS):
        found.take(option, sources.model, sources.variables)
    _take_others(sources, fields, found)
    _set_tensor_parallel(fields)
    _set_model(sources, fields, found)
    if "HF_TOKEN" in sources.variables:
        found.entries.append(SettingEntry("HF_TOKEN", HIDDEN, sources.variables["HF_TOKEN"].source))
    return fields


def _source(option: Option, layer: Mapping[str, Value]) -> str:
    return next(layer[key].source for key in (option.key, *option.aliases) if key in layer)


def _add_argument(fields: dict[str, Any], name: str, text: str, source: str) -> None:
    fields["engine_arguments"][name] = text
    fields["engine_argument_sources"][name] = source


def _take_others(sources: Sources, fields: dict[str, Any], found: Resolution) -> None:
    """What Slipway does not know: `option.<name>` is the engine's, anything else goes nowhere."""
    for key, value in sources.model.items():
        if key in options.BY_KEY:
            continue
        name = key.removeprefix(options.PREFIX)
        if name and name != key:
            _add_argument(fields, name, value.text, value.source)
            found.entries.append(SettingEntry(key, value.text, value.source, "for the engine"))
            continue
        meant = f"{options.PREFIX}{key}"
        hint = f"; {meant} is meant" if meant in options.BY_KEY else "; options of the engine start with option."
        found.ignore(key, value, f"the model has no such setting{hint}")


def _set_tensor_parallel(fields: dict[str, Any]) -> None:
    if fields["tensor_parallel_degree"] == "max":
        fields["tensor_parallel_degree"], fields["tensor_parallel_max"] = None, True


def _set_model(sources: Sources, fields: dict[str, Any], found: Resolution) -> None:
    """Turn option.model_id, or what stands in for it, into what the engine loads; and name it."""
    given = sources.model.get("option.model_id")
    variable = sources.variables.get("HF_MODEL_ID")
    by_variable = given is None and variable is not None
    if given is not None and variable is not None and given.text.strip() != variable.text.strip():
        found.ignore("HF_MODEL_ID", variable, f"one model is served, that of {given.source}")
    _set_revision(sources, fields, by_variable, found)
    value = given or variable
    if value is None:
        _set_own_model(sources.model_dir, fields, found)
    elif fields["model_id"] is not None:
        try:
            fields["model_id"] = location.resolve_model_id(fields["model_id"], sources.model_dir)
        except location.ModelNotFound as error:
            found.problems.append(f"option.model_id is {quoted('', value.text)} ({value.source}): {error}")
    fields["name"] = found.take(server_options.MODEL_NAME_OPTION, sources.server)
    if fields["name"] is None and fields["model_id"] is not None:
        fields["name"] = location.model_name(fields["model_id"], sources.model_dir, by_variable)
        found.entries.append(SettingEntry("model_name", fields["name"], DEFAULT))


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


def _set_own_model(model_dir: Path, fields: dict[str, Any], found: Resolution) -> None:
    if not location.has_model(model_dir):
        found.problems.append(
            f"there is no model: give option.model_id in serving.properties or HF_MODEL_ID in the environment, or put "
            f"the model with its {location.CONFIG_FILE} into the model directory ({model_dir})"
        )
        return
    fields["model_id"] = str(model_dir)
    found.replace(SettingEntry("option.model_id", str(model_dir), DEFAULT, "the model directory"))
