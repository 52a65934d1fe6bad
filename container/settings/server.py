"""The settings of the server: SERVING_<KEY> in the environment, or --<key> on the command line, and how they are read.

Names and defaults are LMI's, except for settings that only Slipway has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from container.api_keys import ApiKeys, keys_in, keys_in_file
from container.observability.error_rates import error_rate
from container.settings.environment import sagemaker_server_layer, serving_layer
from container.settings.options import ALLOW_UNKNOWN, Lookup, Option, closest, refused
from container.settings.settings import SettingEntry
from container.settings.values import (
    BOOLEAN,
    HEADER_NAME,
    HEADER_VALUE,
    HIDDEN,
    HOST,
    HTTP_ERROR,
    LOG_LEVEL,
    MODEL_NAME,
    NAMES_OR_NONE,
    SECONDS,
    SECONDS_OR_NEVER,
    TEXT,
    Parser,
    Value,
    checked,
    choice,
    integer,
    names,
)

SAGEMAKER_METADATA = Path("/opt/ml/.sagemaker_infra/endpoint-metadata.json")  # A file that is there on SageMaker only.
# The defaults that are others there.
_ON_SAGEMAKER = {"request_id_header_key": "X-Amzn-SageMaker-Inference-Id", "console": "false"}
_ADDRESS = re.compile(r"http://(\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_.-]+))(:(?P<port>[0-9]{1,5}))?/?")
_DEFAULT_PORT = "80"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_LARGEST_PORT = 65535
_NO_KEYS = "SageMaker passes no key on to the container; IAM decides who may call the endpoint"
_TLS = "let a proxy in front of the container do TLS"


def address(text: str) -> tuple[str, str]:
    """Host and port of `http://host:port`; the port is 80 if left out. Raises ValueError for another text."""
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
API_KEYS = Option(
    "api_keys", checked(keys_in, "keys of visible ASCII characters, with commas between, or a JSON array")
)
API_KEYS_FILE = Option("api_keys_file", TEXT)
# The settings with a field in `ServerSettings`.
SERVED = (
    Option("host", HOST, "0.0.0.0"),
    Option("port", integer(1, 65535), "8080", variables=("SAGEMAKER_BIND_TO_PORT",)),
    Option("job_queue_size", integer(1), "1000"),
    Option(
        "max_request_size",
        integer(1),
        "67108864",
        variables=("SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
    ),
    Option("max_request_memory", integer(1)),
    Option("request_read_timeout", SECONDS, "60"),
    Option("drain_timeout", SECONDS, "20"),
    Option("fail_fast", BOOLEAN, "false"),
    Option("stall_timeout", SECONDS_OR_NEVER),
    Option("fail_fast_when_stalled", BOOLEAN, "false"),
    Option("engine_restart", integer(0), "3"),
    Option("continue", integer(0), "1", field_name="continue_calls"),
    Option("engine_restart_when_stalled", BOOLEAN, "false"),
    Option("log_format", choice(("plain", "json")), "plain"),
    Option("log_level", LOG_LEVEL, "info"),
    Option("verbose", BOOLEAN, "false"),
    Option("log_prompts", BOOLEAN, "false"),
    Option("capture", TEXT),
    Option("request_id_header_key", HEADER_NAME, "x-request-id", field_name="request_id_header"),
    Option("allow_multi_status", BOOLEAN, "false"),
    Option("health_check_override", BOOLEAN, "false"),
    Option("workers_health_check", BOOLEAN, "false", variables=("SAGEMAKER_HEALTH_CHECK_OVERRIDE",)),
    Option("management_address", _HTTP_ADDRESS),
    Option("multi_model", BOOLEAN, "false", variables=("SAGEMAKER_MULTI_MODEL",)),
    Option("console", BOOLEAN, "true"),
    Option("model_aliases", NAMES_OR_NONE, '"",dummy,tgi,tei,text-embeddings-inference'),
    Option("error_rate_wlm", _ERROR_RATE),
    Option("error_rate_server", _ERROR_RATE),
    Option("error_rate_model", _ERROR_RATE),
    Option("error_rate_any", _ERROR_RATE),
    API_KEYS,
    Option("allowed_hosts", NAMES_OR_NONE, ""),
    Option("cors_allowed_origin", HEADER_VALUE),
    Option("cors_allowed_methods", HEADER_VALUE),
    Option("cors_allowed_headers", HEADER_VALUE),
    Option("throttle_error_http_code", HTTP_ERROR, "503"),
    Option("wlm_error_http_code", HTTP_ERROR, "503"),
    Option("server_error_http_code", HTTP_ERROR, "500"),
)

MODEL_NAME_OPTION = Option("model_name", MODEL_NAME, shows_default=False)
LOAD_MODELS = Option(
    "load_models",
    Parser(lambda text: text.upper() if text.upper() in ("ALL", "NONE") else text, "ALL, NONE, or urls"),
    "ALL",
    shows_default=False,
)
ALLOW_UNKNOWN_OPTION = Option(ALLOW_UNKNOWN.removeprefix("SERVING_").lower(), BOOLEAN, "false", shows_default=False)
# The settings that say which models there are, and where, and how their settings are read.
FOR_MODELS = (
    MODEL_NAME_OPTION,
    Option("model_store", TEXT, "/opt/ml/model"),
    LOAD_MODELS,
    Option("download_dir", TEXT, variables=("DJL_CACHE_DIR",)),
    ALLOW_UNKNOWN_OPTION,
)

NOT_SERVED = (
    refused("model_url_pattern", TEXT, (), "load models with POST /models"),
    *(
        refused(key, TEXT, (), _TLS)
        for key in ("keystore", "keystore_pass", "keystore_type", "private_key_file", "certificate_file")
    ),
)
# LMI's settings that Slipway ignores, and the reason.
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

SERVER_OPTIONS = (*SERVED, API_KEYS_FILE, *FOR_MODELS, *NOT_SERVED)
_INFERENCE_ADDRESS = Option("inference_address", _HTTP_ADDRESS, shows_default=False)
_KEYS = frozenset({*(option.key for option in SERVER_OPTIONS), _INFERENCE_ADDRESS.key})
_SUGGESTED = _KEYS - {option.key for option in NOT_SERVED}


def server_layer(variables: Mapping[str, Value], command_line: Mapping[str, str], lookup: Lookup) -> dict[str, Value]:
    """Return the server's keys, and add their faults to `lookup.problems`."""
    given = {key: Value(text, f"command line: {_flag(key)}") for key, text in command_line.items() if text}
    serving = serving_layer(variables, lookup.problems)
    if (text := lookup.value(_INFERENCE_ADDRESS, serving)) is not None:
        source = serving[_INFERENCE_ADDRESS.key].source
        for key, part in zip(("host", "port"), address(str(text)), strict=True):
            serving.setdefault(key, Value(part, source))
    if API_KEYS.key in given and API_KEYS.key in serving:
        lookup.problems.append(f"--api-key and {serving[API_KEYS.key].source} both set keys; use one of them")
    return {**given, **serving, **sagemaker_server_layer(variables, lookup.problems)}


def _variable(key: str) -> str:
    return f"SERVING_{key.upper()}"


def _flag(key: str) -> str:
    return "--api-key" if key == API_KEYS.key else f"--{key.replace('_', '-')}"


def server_fields(layer: dict[str, Value], lookup: Lookup) -> dict[str, Any]:
    """Return the fields of `ServerSettings`; wrong values are added to `lookup.problems`."""
    if os.path.exists(SAGEMAKER_METADATA):
        for key, text in _ON_SAGEMAKER.items():
            layer.setdefault(key, Value(text, "default on SageMaker"))
        for option in (API_KEYS, API_KEYS_FILE):
            if (given := layer.pop(option.key, None)) is not None:
                lookup.warnings.append(f"{option.key} ({given.source}) is ignored: {_NO_KEYS}")
    fields: dict[str, Any] = {option.field: lookup.value(option, layer) for option in SERVED}
    fields[API_KEYS.field] = _api_keys(fields[API_KEYS.field], layer, lookup)
    for name in ("model_aliases", "allowed_hosts"):
        fields[name] = names(str(fields[name]))
    for option in (LOAD_MODELS, ALLOW_UNKNOWN_OPTION, *NOT_SERVED):
        lookup.value(option, layer)
    if fields["management_address"] is not None and _is_main_listener(layer, fields):
        fields["management_address"] = None
    for key, value in sorted(layer.items()):
        if key in IGNORED:
            lookup.ignore(key, value, IGNORED[key])
        elif key in _KEYS:
            continue
        elif value.source.startswith("command line"):
            lookup.problems.append(f"{value.source}: there is no such option")
        else:  # DJL ignores such a name, too. Kubernetes sets some, for a service that is called `serving`.
            meant = closest(key, _SUGGESTED)
            lookup.unknown(_variable(key), value, meant and _variable(meant), stops=False)
    return fields


def _api_keys(text: str | None, layer: Mapping[str, Value], lookup: Lookup) -> ApiKeys | None:
    """Return the keys in `text` (the variable) and the keys in the file; None if neither is set."""
    keys: list[str] = []
    if text is not None:
        lookup.replace(SettingEntry(API_KEYS.key, HIDDEN, layer[API_KEYS.key].source))  # the report has no key
        keys += keys_in(text)
    if (path := lookup.value(API_KEYS_FILE, layer)) is not None:
        try:
            keys += keys_in_file(str(path))
        except ValueError as error:
            lookup.problems.append(f"{layer[API_KEYS_FILE.key].describe(API_KEYS_FILE.key)}: {error}")
    return ApiKeys.of(keys) if keys else None


def _is_main_listener(layer: Mapping[str, Value], fields: Mapping[str, Any]) -> bool:
    inference = layer.get(_INFERENCE_ADDRESS.key)
    if inference is not None and inference.text == layer["management_address"].text:
        return True
    return address(fields["management_address"]) == (fields["host"], str(fields["port"]))
