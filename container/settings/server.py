"""Declares and reads the settings of the server: SERVING_<KEY> in the environment, or --<key> on the command line.

Names and defaults are LMI's, except for settings that only Slipway has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from container.api_keys import ApiKeys, keys_in, keys_in_file
from container.observability.error_rates import error_rate
from container.settings.environment import sagemaker_server_layer, serving_layer
from container.settings.lookup import ALLOW_UNKNOWN, Lookup, SettingEntry, closest
from container.settings.values import HIDDEN, Value
from engines.settings.declaration import Setting, declared, refused, setting
from engines.settings.parsers import (
    BOOLEAN,
    NAMES_OR_NONE,
    SECONDS,
    SECONDS_OR_NEVER,
    TEXT,
    Parser,
    checked,
    choice,
    integer,
    matching,
)

LogFormat = Literal["plain", "json"]

SAGEMAKER_METADATA = Path("/opt/ml/.sagemaker_infra/endpoint-metadata.json")  # A file that exists only on SageMaker.
# The defaults that differ on SageMaker.
_ON_SAGEMAKER = {"request_id_header_key": "X-Amzn-SageMaker-Inference-Id", "console": "false", "blackbox_log": "true"}
_ADDRESS = re.compile(r"http://(\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_.-]+))(:(?P<port>[0-9]{1,5}))?/?")
_DEFAULT_PORT = "80"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_LARGEST_PORT = 65535
_NO_KEYS = "SageMaker passes no key on to the container; IAM decides who may call the endpoint"
_TLS = "let a proxy in front of the container do TLS"


def address(text: str) -> tuple[str, str]:
    """Return the host and port of `http://host:port`. The default port is 80. Raise ValueError for any other text."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    port = match["port"] or _DEFAULT_PORT
    if not 1 <= int(port) <= _LARGEST_PORT:
        raise ValueError(text)
    return match["v6"] or match["host"], port


def url_of(host: str, port: int) -> str:
    """Return the URL of a listener for a client on this machine."""
    host = _LOOPBACK.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_HTTP_ADDRESS = checked(address, "http://host:port, without TLS")
_ERROR_RATE = checked(error_rate, "a number, or a number and an ISO-8601 duration, such as 10/PT5M")
_HEADER_VALUE = matching(r"[\x20-\x7e]+", "the value of an HTTP header, in ASCII")
_HTTP_ERROR = integer(400, 599)
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
DIRECTORY_OR_NONE = Parser(lambda text: "" if text.strip().lower() == "none" else text, "a directory, or none")
API_KEYS = Setting(
    "api_keys",
    checked(keys_in, "keys of visible ASCII characters, with commas between, or a JSON array"),
    doc="[API keys](security.md#keys), of which each caller needs one; default: callers need no key",
)
API_KEYS_FILE = Setting("api_keys_file", TEXT, doc="File with further API keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the process listens, queues, logs and exits.

    Sizes are in bytes, times in seconds.
    """

    host: str = setting(
        "host", matching(r"[A-Za-z0-9_.:%-]+", "a host name or an address"), "0.0.0.0", doc="Address to listen on"
    )
    port: int = setting(
        "port", integer(1, 65535), "8080", variables=("SAGEMAKER_BIND_TO_PORT",), doc="Port to listen on"
    )
    job_queue_size: int = setting(
        "job_queue_size",
        integer(1),
        "1000",
        doc="Sequences that may wait. Custom handler: one more than the calls that may wait while all workers are "
        "busy. A model's `job_queue_size` takes precedence",
    )
    max_request_size: int = setting(
        "max_request_size",
        integer(1),
        "67108864",
        variables=("SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
        doc="Maximum size of a body in bytes (`SAGEMAKER_MAX_PAYLOAD_IN_MB`: in MiB). A larger body gets 413",
    )
    max_request_memory: int | None = setting(
        "max_request_memory",
        integer(1),
        doc="Memory for all bodies over 64 KiB together, in bytes ([overload](operations.md#overload)); default: a "
        "quarter of the memory",
    )
    request_read_timeout: float = setting(
        "request_read_timeout", SECONDS, "60", doc="Time after which a body without new data is refused with 408"
    )
    drain_timeout: float = setting(
        "drain_timeout", SECONDS, "20", doc="Time that running requests have to finish after SIGTERM"
    )
    fail_fast: bool = setting("fail_fast", BOOLEAN, "false", doc="Exit if the engine dies and cannot be restarted")
    # If None, the limit is 60 s, or 300 s while the engine has worked for less than ten minutes.
    stall_timeout: float | None = setting(
        "stall_timeout",
        SECONDS_OR_NEVER,
        doc="Time without progress after which `/ping` is 500; 0: never; "
        "default: [60, or 300](operations.md#stalled-engines)",
    )
    fail_fast_when_stalled: bool = setting(
        "fail_fast_when_stalled", BOOLEAN, "false", doc="With `fail_fast`: also exit if the engine is stalled"
    )
    engine_restart: int = setting(
        "engine_restart",
        integer(0),
        "3",
        doc="Maximum number of [restarts](operations.md#health) of each copy in ten minutes. After one more failure, "
        "`fail_fast` applies",
    )
    continue_calls: int = setting(
        "continue",
        integer(0),
        "1",
        doc="Number of the engine's deaths after which [calls continue](operations.md#calls-that-outlive-the-engine) "
        "together. After one more death, they continue one by one. 0: they get an error",
    )
    engine_restart_when_stalled: bool = setting(
        "engine_restart_when_stalled",
        BOOLEAN,
        "false",
        doc="Also restart a stalled engine, within the limit of `engine_restart`",
    )
    log_format: LogFormat = setting(
        "log_format", choice({word: word for word in get_args(LogFormat)}), "plain", doc="Format of the log"
    )
    log_level: str = setting(
        "log_level",
        choice({level: level for level in _LOG_LEVELS} | {"warn": "warning"}),
        "info",
        doc="Lowest level of the lines that are logged",
    )
    verbose: bool = setting(
        "verbose", BOOLEAN, "false", doc="Log [all lines](operations.md#logs) of vLLM and other libraries"
    )
    explain: bool = setting("explain", BOOLEAN, "true", doc="[Explain](explain.md) the calls that ask for it")
    log_prompts: bool = setting("log_prompts", BOOLEAN, "false", doc="Log the bodies of requests, including prompts")
    capture: str | None = setting(
        "capture",
        TEXT,
        doc="Directory in which [each inference request is recorded](security.md#recorded-requests); also `--capture`",
    )
    # If None, black boxes are in the cache directory. If empty, no files are written.
    blackbox_dir: str | None = setting(
        "blackbox_dir",
        DIRECTORY_OR_NONE,
        doc="Directory for [black boxes](operations.md#black-boxes), or `none`; default: `blackbox` in "
        "`SLIPWAY_CACHE_DIR`",
    )
    blackbox_log: bool = setting(
        "blackbox_log", BOOLEAN, "false", doc="Log a short form of each black box; on SageMaker the default is true"
    )
    request_id_header: str = setting(
        "request_id_header_key",
        matching(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", "the name of an HTTP header"),
        "x-request-id",
        doc="Header with the request's id; on SageMaker the default is `X-Amzn-SageMaker-Inference-Id`",
    )
    allow_multi_status: bool = setting(
        "allow_multi_status", BOOLEAN, "false", doc="`/ping` is 207 while the model loads"
    )
    health_check_override: bool = setting(
        "health_check_override", BOOLEAN, "false", doc="Failures of workers do not make a custom handler unhealthy"
    )
    workers_health_check: bool = setting(
        "workers_health_check",
        BOOLEAN,
        "false",
        variables=("SAGEMAKER_HEALTH_CHECK_OVERRIDE",),
        doc="`/ping` is 500 while fewer workers or copies than `minWorkers` serve",
    )
    management_address: str | None = setting(
        "management_address",
        _HTTP_ADDRESS,
        doc="Separate listener for [the management API](management.md#the-management-api)",
    )
    multi_model: bool = setting(
        "multi_model",
        BOOLEAN,
        "false",
        variables=("SAGEMAKER_MULTI_MODEL",),
        doc="Start without a model, with [SageMaker's management API](management.md#sagemakers-multi-model-endpoints)",
    )
    console: bool = setting(
        "console", BOOLEAN, "true", doc="Serve [the console](console.md); on SageMaker the default is false"
    )
    model_aliases: tuple[str, ...] = setting(
        "model_aliases",
        NAMES_OR_NONE,
        '"",dummy,tgi,tei,text-embeddings-inference',
        doc="Further names that the field `model` may have on OpenAI's routes",
    )
    error_rate_wlm: str | None = setting(
        "error_rate_wlm",
        _ERROR_RATE,
        doc="Maximum [error rate](operations.md#error-rates) of refusals, because the queue is full or the model is "
        "not ready",
    )
    error_rate_server: str | None = setting(
        "error_rate_server", _ERROR_RATE, doc="Maximum error rate of the statuses 424 and 5xx"
    )
    error_rate_model: str | None = setting(
        "error_rate_model", _ERROR_RATE, doc="Maximum error rate of the statuses 424 and 5xx, except refusals"
    )
    error_rate_any: str | None = setting(
        "error_rate_any", _ERROR_RATE, doc="Maximum error rate of the statuses 4xx and 5xx"
    )
    # The API keys. Each caller needs one of them. If None, callers need no key.
    api_keys: ApiKeys | None = field(default=None, metadata=API_KEYS.metadata)
    # Further host names under which browsers may reach the server's own routes (`container.http.cross_site`).
    allowed_hosts: tuple[str, ...] = setting(
        "allowed_hosts",
        NAMES_OR_NONE,
        "",
        doc="Further host names under which [browsers](security.md#browsers) may reach the server",
    )
    cors_allowed_origin: str | None = setting(
        "cors_allowed_origin", _HEADER_VALUE, doc="Value of `Access-Control-Allow-Origin`; default: no CORS"
    )
    cors_allowed_methods: str | None = setting(
        "cors_allowed_methods", _HEADER_VALUE, doc="Value of `Access-Control-Allow-Methods`"
    )
    cors_allowed_headers: str | None = setting(
        "cors_allowed_headers", _HEADER_VALUE, doc="Value of `Access-Control-Allow-Headers`"
    )
    throttle_error_http_code: int = setting(
        "throttle_error_http_code", _HTTP_ERROR, "503", doc="Status on LMI's routes if the queue is full"
    )
    wlm_error_http_code: int = setting(
        "wlm_error_http_code", _HTTP_ERROR, "503", doc="Status on LMI's routes if the model is not ready"
    )
    server_error_http_code: int = setting(
        "server_error_http_code", _HTTP_ERROR, "500", doc="Status of an unexpected error on LMI's routes"
    )


MODEL_NAME = Setting(
    "model_name",
    matching(r"[A-Za-z0-9_.-]+", "letters, digits and _ . -"),
    shows_default=False,
    doc="The model's name in routes and `/ping`",
)
LOAD_MODELS = Setting(
    "load_models",
    Parser(lambda text: text.upper() if text.upper() in ("ALL", "NONE") else text, "ALL, NONE, or urls"),
    "ALL",
    shows_default=False,
    doc="[Models at the start](management.md#at-the-start)",
)
_ALLOW_UNKNOWN = Setting(
    ALLOW_UNKNOWN.removeprefix("SERVING_").lower(),
    BOOLEAN,
    "false",
    shows_default=False,
    doc="[Unknown names](#errors) cause a warning instead of an error",
)
# The settings that name models, locate them, or change how the models' settings are read.
FOR_MODELS: tuple[Setting[Any], ...] = (
    MODEL_NAME,
    Setting("model_store", TEXT, "/opt/ml/model", doc="Model directory, or `s3://`"),
    LOAD_MODELS,
    Setting(
        "download_dir",
        TEXT,
        variables=("DJL_CACHE_DIR",),
        doc="Directory for [models from S3](model_sources.md#kept-files)",
    ),
    _ALLOW_UNKNOWN,
)

NOT_SERVED: tuple[Setting[Any], ...] = (
    refused("model_url_pattern", TEXT, (), "load models with POST /models"),
    *(
        refused(key, TEXT, (), _TLS)
        for key in ("keystore", "keystore_pass", "keystore_type", "private_key_file", "certificate_file")
    ),
)
# LMI's settings that Slipway ignores, with the reasons.
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(
        ("plugin_folder", "number_of_netty_threads", "netty_client_threads", "use_native_io", "features"),
        "it has no counterpart here",
    ),
    "wait_model_loading": "the port opens at once, and /ping says when the model is ready",
    "chunked_read_timeout": "`option.predict_timeout` limits the wait for a token",
    "bad_request_http_code": "bad requests have the status that their contract says",
    "prometheus": "metrics are at /metrics",
    "timeout_http_code": "LMI does not use it either",
    "engine": "LMI does not read it either; `engine` of serving.properties is meant, or OPTION_ENGINE",
}

# The settings in the table of the documentation.
SERVED: tuple[Setting[Any], ...] = (*declared(ServerConfig).values(), API_KEYS_FILE, *FOR_MODELS)
_INFERENCE_ADDRESS = Setting("inference_address", _HTTP_ADDRESS, shows_default=False)
SUGGESTED = frozenset({*(setting.key for setting in SERVED), _INFERENCE_ADDRESS.key})
_KEYS = SUGGESTED | {setting.key for setting in NOT_SERVED}


def server_layer(variables: Mapping[str, Value], command_line: Mapping[str, str], lookup: Lookup) -> dict[str, Value]:
    """Return the server's keys and their texts. Faults are added to `lookup.problems`."""
    given = {key: Value(text, f"command line: {_flag(key)}") for key, text in command_line.items() if text}
    serving = serving_layer(variables, lookup.problems)
    if (text := lookup.value(_INFERENCE_ADDRESS, serving)) is not None:
        source = serving[_INFERENCE_ADDRESS.key].source
        for key, part in zip(("host", "port"), address(text), strict=True):
            serving.setdefault(key, Value(part, source))
    if API_KEYS.key in given and API_KEYS.key in serving:
        lookup.problems.append(f"--api-key and {serving[API_KEYS.key].source} both set keys; use one of them")
    return {**given, **serving, **sagemaker_server_layer(variables, lookup.problems)}


def variable(key: str) -> str:
    """Return the environment variable of a setting."""
    return f"SERVING_{key.upper()}"


def _flag(key: str) -> str:
    return "--api-key" if key == API_KEYS.key else f"--{key.replace('_', '-')}"


def read_server_config(layer: dict[str, Value], lookup: Lookup) -> ServerConfig:
    """Return the server's settings. Wrong values are added to `lookup.problems`."""
    if os.path.exists(SAGEMAKER_METADATA):
        for key, text in _ON_SAGEMAKER.items():
            layer.setdefault(key, Value(text, "default on SageMaker"))
        for name in (API_KEYS.key, API_KEYS_FILE.key):
            if (given := layer.pop(name, None)) is not None:
                lookup.warnings.append(f"{name} ({given.source}) is ignored: {_NO_KEYS}")
    server_config = lookup.read(ServerConfig, layer, api_keys=_api_keys(layer, lookup))
    others: tuple[Setting[Any], ...] = (LOAD_MODELS, _ALLOW_UNKNOWN, *NOT_SERVED)
    for other in others:
        lookup.value(other, layer)
    if server_config.management_address is not None and _is_main_listener(
        layer, server_config.management_address, server_config
    ):
        server_config = replace(server_config, management_address=None)
    for key, value in sorted(layer.items()):
        if key in IGNORED:
            lookup.ignore(key, value, IGNORED[key])
        elif key in _KEYS:
            continue
        elif value.source.startswith("command line"):
            lookup.problems.append(f"{value.source}: there is no such option")
        else:  # DJL ignores unknown names, too. Kubernetes sets such variables for a service called `serving`.
            meant = closest(key, SUGGESTED)
            lookup.unknown(variable(key), value, meant and variable(meant), stops=False)
    return server_config


def _api_keys(layer: Mapping[str, Value], lookup: Lookup) -> ApiKeys | None:
    """Return the keys of the settings `api_keys` and `api_keys_file`. None if neither setting has a value."""
    keys: list[str] = []
    if (text := lookup.value(API_KEYS, layer)) is not None:
        # The report must not contain keys.
        lookup.replace(SettingEntry(API_KEYS.key, HIDDEN, layer[API_KEYS.key].source))
        keys += keys_in(text)
    if (path := lookup.value(API_KEYS_FILE, layer)) is not None:
        try:
            keys += keys_in_file(path)
        except ValueError as error:
            lookup.problems.append(f"{layer[API_KEYS_FILE.key].describe(API_KEYS_FILE.key)}: {error}")
    return ApiKeys.of(keys) if keys else None


def _is_main_listener(layer: Mapping[str, Value], management: str, server_config: ServerConfig) -> bool:
    inference = layer.get(_INFERENCE_ADDRESS.key)
    if inference is not None and inference.text == layer["management_address"].text:
        return True
    return address(management) == (server_config.host, str(server_config.port))
