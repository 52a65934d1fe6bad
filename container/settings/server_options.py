"""The server's settings: SERVING_<KEY> in the environment, or --<key> on the command line.

Names and defaults are LMI's (contracts/lmi.md 1.7, 1.12, 2.5 and 2.9), save for those that only Slipway has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from container.settings.options import Option
from container.settings.parsers import (
    ANYTHING,
    BOOLEAN,
    ERROR_RATE,
    HEADER_NAME,
    HEADER_VALUE,
    HTTP_ERROR,
    MODEL_NAME,
    SECONDS,
    SECONDS_OR_NEVER,
    TEXT,
    Parser,
    choice,
    integer,
    matching,
)
from container.settings.properties import Value, quoted

_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_.-]+))(:(?P<port>[0-9]{1,5}))?/?"
)
_DEFAULT_PORT = "80"


class AddressError(Exception):
    """An address that Slipway cannot listen on; the message names the key, the source and what is allowed."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: str

    @classmethod
    def parse(cls, value: Value, key: str = "management_address") -> Address:
        """Parse `http://host:port`; the port is 80 if left out.

        Raises:
            AddressError: no such address, or one with TLS or of a Unix socket.
        """
        match = _ADDRESS.fullmatch(value.text.strip())
        given = f"{key} is {quoted(key, value.text)} ({value.source})"
        if match is None:
            raise AddressError(f"{given}; allowed: http://<host>:<port>")
        if match["scheme"] == "https":
            raise AddressError(
                f"{given}: not served by this version of Slipway; let a proxy in front of the container do TLS"
            )
        return cls(match["v6"] or match["host"], match["port"] or _DEFAULT_PORT)


def expand_address(layer: dict[str, Value]) -> None:
    """Set `host` and `port` from `inference_address`, unless the same layer has them.

    Raises:
        AddressError: the address is none.
    """
    value = layer.get("inference_address")
    if value is None:
        return
    address = Address.parse(value, "inference_address")
    layer.setdefault("host", Value(address.host, value.source))
    layer.setdefault("port", Value(address.port, value.source))


_HOST = matching(re.compile(r"[A-Za-z0-9_.:%-]+"), "a host name or an address")
_LEVELS = {
    **{level: level for level in ("debug", "info", "warning", "error", "critical")},
    "warn": "warning",
}
_ERROR_RATES = {
    "wlm": "Refusals for want of room or of a worker, in a minute or in the time after `/`; more of them, and /ping "
    "answers 503 for good",
    "server": "The same of answers with 424 or 5xx",
    "model": "The same of answers with 424 or 5xx that are no such refusals",
    "any": "The same of answers with 4xx or 5xx",
}
_TLS = "let a proxy in front of the container do TLS"

SERVED = (
    Option(key="host", parser=_HOST, default="0.0.0.0", field="host", meaning="Address to listen on"),
    Option(
        key="port",
        parser=integer(1, 65535),
        default="8080",
        field="port",
        variables=("SAGEMAKER_BIND_TO_PORT",),
        meaning="Port to listen on",
    ),
    Option(
        key="job_queue_size",
        parser=integer(1),
        default="1000",
        field="job_queue_size",
        meaning="Sequences that may wait beside those that run; more are refused; a model's own `job_queue_size` goes "
        "before it. With a custom handler: calls, of which one is with a worker",
    ),
    Option(
        key="max_request_size",
        parser=integer(1),
        default="67108864",
        field="max_request_size",
        variables=("SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
        meaning="Bytes of a request's body; more is 413",
    ),
    Option(
        key="request_read_timeout",
        parser=SECONDS,
        default="60",
        field="request_read_timeout",
        meaning="Seconds that a client may send nothing in the middle of a request's body; then it is 408",
    ),
    Option(
        key="drain_timeout",
        parser=SECONDS,
        default="20",
        field="drain_timeout",
        meaning="Seconds that running requests get after SIGTERM",
    ),
    Option(
        key="fail_fast",
        parser=BOOLEAN,
        default="false",
        field="fail_fast",
        meaning="Exit when the engine dies instead of answering that it is gone",
    ),
    Option(
        key="stall_timeout",
        parser=SECONDS_OR_NEVER,
        default="60",
        field="stall_timeout",
        meaning="Seconds in which requests run and the engine makes nothing of them, after which /ping answers 500; "
        "0: never",
    ),
    Option(
        key="fail_fast_when_stalled",
        parser=BOOLEAN,
        default="false",
        field="fail_fast_when_stalled",
        meaning="Under `fail_fast`, exit when the engine is stalled, too",
    ),
    Option(
        key="log_format", parser=choice(("plain", "json")), default="plain", field="log_format", meaning="Form of logs"
    ),
    Option(key="log_level", parser=choice(_LEVELS), default="info", field="log_level", meaning="Least level logged"),
    Option(
        key="log_prompts",
        parser=BOOLEAN,
        default="false",
        field="log_prompts",
        meaning="Log request bodies, prompts and all",
    ),
    Option(
        key="request_id_header_key",
        parser=HEADER_NAME,
        default="x-request-id",
        field="request_id_header",
        meaning="Header with the request's id; on SageMaker the default is `X-Amzn-SageMaker-Inference-Id`",
    ),
    Option(
        key="allow_multi_status",
        parser=BOOLEAN,
        default="false",
        field="allow_multi_status",
        meaning="/ping answers 207 while the model loads",
    ),
    Option(
        key="health_check_override",
        parser=BOOLEAN,
        default="false",
        field="health_check_override",
        meaning="A custom handler counts as healthy however often its workers crash",
    ),
    Option(
        key="workers_health_check",
        parser=BOOLEAN,
        default="false",
        field="workers_health_check",
        variables=("SAGEMAKER_HEALTH_CHECK_OVERRIDE",),
        meaning="/ping answers 500 while a custom handler has fewer workers than `minWorkers`",
    ),
    Option(
        key="management_address",
        parser=ANYTHING,
        field="management_address",
        meaning="`http://<host>:<port>` of a listener of its own for the management API; the main one has it otherwise",
    ),
    Option(
        key="multi_model",
        parser=BOOLEAN,
        default="false",
        field="multi_model",
        variables=("SAGEMAKER_MULTI_MODEL",),
        meaning="Start without a model and speak SageMaker's form of the management API",
    ),
    Option(
        key="coalesce_above",
        parser=integer(0),
        default="32",
        field="coalesce_above",
        meaning="From so many open streams on, tokens of a stream that come faster than they are sent share an HTTP "
        "chunk; 0: never",
    ),
    Option(
        key="model_aliases",
        parser=ANYTHING,
        default='"",dummy,tgi',
        field="model_aliases",
        meaning="Further values of `model` on OpenAI's routes that stand for the model, with commas between",
    ),
    *(
        Option(key=f"error_rate_{kind}", parser=ERROR_RATE, field=f"error_rate_{kind}", meaning=meaning)
        for kind, meaning in _ERROR_RATES.items()
    ),
    Option(key="cors_allowed_origin", parser=HEADER_VALUE, field="cors_allowed_origin", meaning="CORS origin"),
    Option(key="cors_allowed_methods", parser=HEADER_VALUE, field="cors_allowed_methods", meaning="CORS methods"),
    Option(key="cors_allowed_headers", parser=HEADER_VALUE, field="cors_allowed_headers", meaning="CORS headers"),
    Option(
        key="throttle_error_http_code",
        parser=HTTP_ERROR,
        default="503",
        field="throttle_error_http_code",
        meaning="Status of an answer when the queue is full",
    ),
    Option(
        key="wlm_error_http_code",
        parser=HTTP_ERROR,
        default="503",
        field="wlm_error_http_code",
        meaning="Status of an answer when the model is not ready",
    ),
    Option(
        key="server_error_http_code",
        parser=HTTP_ERROR,
        default="500",
        field="server_error_http_code",
        meaning="Status of an answer to an unexpected error",
    ),
)

MODEL_NAME_OPTION = Option(
    key="model_name", parser=MODEL_NAME, meaning="What the model is called in routes and in /ping"
)
MODEL_STORE_OPTION = Option(
    key="model_store",
    parser=TEXT,
    default="/opt/ml/model",
    meaning="Directory, or `s3://`, with serving.properties or the model",
)
DOWNLOAD_DIR_OPTION = Option(
    key="download_dir",
    parser=TEXT,
    variables=("DJL_CACHE_DIR",),
    meaning="Where models of S3 are kept; without it, the user's cache, on SageMaker `/tmp/slipway`",
)
LOAD_MODELS_OPTION = Option(
    key="load_models",
    parser=Parser(lambda text: text.upper() if text.upper() in ("ALL", "NONE") else text, "ALL, NONE, or urls"),
    default="ALL",
    meaning="Models that are loaded at the start: all of the model store, none, or a list of "
    "`[<name>[:<version>]=]<url>` with commas between",
)
FOR_MODEL = (MODEL_NAME_OPTION, MODEL_STORE_OPTION, LOAD_MODELS_OPTION, DOWNLOAD_DIR_OPTION)
ADDRESS_KEYS = ("inference_address",)


def _leftover(key: str, remark: str) -> Option:
    return Option(key=key, parser=ANYTHING, meaning="Ignored", remark=f"ignored: {remark}")


NOT_SERVED = (
    Option(
        key="model_url_pattern",
        parser=TEXT,
        serves=frozenset(),
        meaning="Models that requests may load",
        advice="load models with POST /models",
    ),
    *(
        Option(key=key, parser=TEXT, serves=frozenset(), meaning="TLS", advice=_TLS)
        for key in ("keystore", "keystore_pass", "keystore_type", "private_key_file", "certificate_file")
    ),
)

LEFTOVERS = (
    *(
        _leftover(key, "it has no counterpart here")
        for key in ("plugin_folder", "number_of_netty_threads", "netty_client_threads", "use_native_io", "features")
    ),
    _leftover("wait_model_loading", "the port opens at once, and /ping says when the model is ready"),
    _leftover("chunked_read_timeout", "`option.predict_timeout` limits the wait for a token"),
    _leftover("bad_request_http_code", "bad requests have the status that their contract says"),
    _leftover("prometheus", "metrics are at /metrics"),
    _leftover("timeout_http_code", "LMI does not use it either"),
)

SERVER_OPTIONS = (*SERVED, *NOT_SERVED, *LEFTOVERS)
