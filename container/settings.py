"""The settings of one server process, made of serving.properties, the environment and the command line.

`container.setting_sources` says what goes before what; `container.options` and `container.server_options` say what
there is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from container import likely_names, server_options
from container.addresses import Address, AddressError
from container.aliases import AppliedAlias, overruled
from container.handler_fields import is_offline
from container.masking import quoted
from container.model_fields import model_fields
from container.option_parsers import names
from container.properties import Value
from container.resolution import Resolution, SettingEntry
from container.setting_sources import Sources, read_sources
from container.sources.remote_model import RemoteModel
from handlers.model_settings import ModelSettings

__all__ = ["ServerSettings", "SettingEntry", "Settings", "SettingsError", "load_settings"]

_VLLM = ("auto", "vllm", "lmi-dist")
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
    drain_timeout: float = 20.0
    """Seconds."""
    fail_fast: bool = False
    stall_timeout: float = 60.0
    """Seconds; 0: a stalled engine is not looked for."""
    fail_fast_when_stalled: bool = False
    log_format: Literal["plain", "json"] = "plain"
    log_level: str = "info"
    log_prompts: bool = False
    request_id_header: str = "x-request-id"
    allow_multi_status: bool = False
    health_check_override: bool = False
    workers_health_check: bool = False
    coalesce_above: int = 32
    error_rate_wlm: str | None = None
    """This and the following: `container.error_rates` reads them."""
    error_rate_server: str | None = None
    error_rate_model: str | None = None
    error_rate_any: str | None = None
    cors_allowed_origin: str | None = None
    cors_allowed_methods: str | None = None
    cors_allowed_headers: str | None = None
    model_aliases: tuple[str, ...] = ("dummy", "tgi")
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
    remote_models: tuple[RemoteModel, ...] = ()
    """Their weights are to be fetched before the model is loaded."""
    aliases: tuple[AppliedAlias, ...] = ()
    """Environment variables that stood for others."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the libraries below are to see."""


class SettingsError(Exception):
    """The settings cannot be used; `problems` names each one: the option, its source, its value, what is allowed."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_settings(
    model_dir: Path | str | None, environ: Mapping[str, str], command_line: Mapping[str, str] | None = None
) -> Settings:
    """Read and check all settings; of a model on S3, all but the weights are fetched for that.

    `model_dir` is --model-dir, a directory or `s3://`; without it SERVING_MODEL_STORE counts, else /opt/ml/model.
    `command_line` holds server keys such as "port", "host", "model_name".

    Raises:
        SettingsError: something is wrong; all that is wrong is listed.
    """
    found = Resolution()
    sources = read_sources(model_dir, environ, command_line or {}, found)
    _refuse_modes(sources, found)
    server = _server_fields(sources, found)
    model = model_fields(sources, found)
    _warn_of_names(environ, sources, model, found)
    if server["health_check_override"] and model.get("handler") is not None:
        model["handler"] = replace(model["handler"], retry_threshold=sys.maxsize)
    if found.problems:
        raise SettingsError(tuple(dict.fromkeys(found.problems)))
    return Settings(
        ServerSettings(**server),
        ModelSettings(**model),
        tuple(found.entries),
        tuple(dict.fromkeys(found.warnings)),
        sources.remote_models.opened,
        sources.aliases,
        _exports(sources),
    )


def _warn_of_names(environ: Mapping[str, str], sources: Sources, model: Mapping[str, Any], found: Resolution) -> None:
    """Of variables and options that do nothing, and were probably meant to."""
    by_setting = {entry.name: entry.source for entry in found.entries}
    found.warnings.extend(filter(None, (overruled(alias, by_setting) for alias in sources.aliases)))
    found.warnings.extend(likely_names.unknown_variables(environ))
    if model.get("rolling_batch") in _VLLM and "engine_arguments" in model:
        found.warnings.extend(likely_names.unknown_options(model["engine_arguments"], model["engine_argument_sources"]))


def _exports(sources: Sources) -> dict[str, str]:
    """What the libraries read by themselves, where it was given under another name."""
    exports = {}
    if (token := sources.variables.get("HF_TOKEN")) is not None:
        exports["HF_TOKEN"] = token.text.strip()
    if is_offline(sources):
        exports["HF_HUB_OFFLINE"] = "1"
    return exports


def _refuse_modes(sources: Sources, found: Resolution) -> None:
    for name, what in (("SAGEMAKER_MULTI_MODEL", "several models"), ("SAGEMAKER_SECURE_MODE", "the secure mode")):
        value = sources.variables.get(name)
        if value is not None and value.text.strip().lower() == "true":
            found.problems.append(f"{name} is true ({value.source}): {what}: not served by this version of Slipway")


def _server_fields(sources: Sources, found: Resolution) -> dict[str, Any]:
    layer = sources.server
    if "request_id_header_key" not in layer and os.path.exists(SAGEMAKER_METADATA):
        layer["request_id_header_key"] = Value("X-Amzn-SageMaker-Inference-Id", "default on SageMaker")
    fields: dict[str, Any] = {
        option.field: found.take(option, layer) for option in server_options.SERVED if option.field
    }
    fields["model_aliases"] = names(str(fields["model_aliases"]))
    for option in (*server_options.NOT_SERVED, *server_options.LEFTOVERS):
        found.take(option, layer)
    _check_management(layer, fields, found)
    known = {option.key for option in server_options.SERVER_OPTIONS}
    known |= {server_options.MODEL_NAME_OPTION.key, *server_options.ADDRESS_KEYS}
    for key in sorted(layer.keys() - known):
        if layer[key].source.startswith("command line"):
            found.problems.append(f"{layer[key].source}: there is no such option")
        else:
            found.ignore(key, layer[key], "the server has no such setting" + likely_names.server_hint(key, layer[key]))
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
