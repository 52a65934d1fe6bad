"""Reads serving.properties and the environment into layers of values that know where they came from.

LMI's rules (contracts/lmi.md 2.1 to 2.3, 2.5): which variable sets which key, and what goes before what. Nothing is
interpreted here; `container.settings.options` says what a value may be.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import javaproperties

HIDDEN = "***"
_LONGEST_QUOTE = 200

# Names that hold a credential as a whole. `max_num_batched_tokens` and the like end in "tokens" and are not meant.
_SECRET_NAME = re.compile(r"(token|api_?key|password|passwd|secret|credentials?|access_?key)$", re.IGNORECASE)
_WHOLLY_HIDDEN = frozenset({"option.env"})
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{12,}"  # a Hugging Face token
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"  # an AWS access key
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password in a URL
)


def masked(name: str, text: str) -> str:
    """`text` with what looks like a credential replaced, judged by the setting's name and by the text itself."""
    if text and (name in _WHOLLY_HIDDEN or _SECRET_NAME.search(name)):
        return HIDDEN
    return _SECRET_VALUE.sub(HIDDEN, text)


def quoted(name: str, text: str) -> str:
    """`masked` text for a message: in quotes, on one line, cut short."""
    shown = masked(name, text)
    if len(shown) > _LONGEST_QUOTE:
        shown = shown[:_LONGEST_QUOTE] + "..."
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


FILE_NAME = "serving.properties"

# SageMaker's variables that overwrite a key of the model (lmi.md 2.5, sagemaker_hosting.md 7).
SAGEMAKER_MODEL_KEYS = (
    ("SAGEMAKER_STARTUP_TIMEOUT", "option.model_loading_timeout"),
    ("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "option.predict_timeout"),
    ("SAGEMAKER_NUM_MODEL_WORKERS", "minWorkers"),
    ("SAGEMAKER_NUM_MODEL_WORKERS", "maxWorkers"),
    ("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "option.default_accept"),
    ("SAGEMAKER_ENABLE_STATEFUL_SESSIONS", "option.enable_stateful_sessions"),
    ("SAGEMAKER_SESSIONS_EXPIRATION", "option.sessions_expiration"),
    ("SAGEMAKER_SESSIONS_PATH", "option.sessions_path"),
)

# Server keys that are the default of a model's key (lmi.md 2.1, 2.3 and 2.10).
SERVER_DEFAULTS_OF_MODEL_KEYS = {
    "batch_size": "batch_size",
    "max_batch_delay": "max_batch_delay",
    "max_idle_time": "max_idle_time",
    "min_workers": "minWorkers",
    "max_workers": "maxWorkers",
    "load_on_devices": "load_on_devices",
    "reserved_memory_mb": "reserved_memory_mb",
    "retry_threshold": "retry_threshold",
}

_OPTION_KEYS = {"ENTRYPOINT": "option.entryPoint", "ENGINE": "engine"}
PREFIXES = ("OPTION_", "ARGS_", "SERVING_")
"""Of variables that may have any name behind."""
VARIABLES = frozenset(
    {
        *(name for name, _ in SAGEMAKER_MODEL_KEYS),
        *("HF_MODEL_ID", "HF_REVISION", "HF_TASK", "HF_TOKEN", "DJL_ENTRY_POINT", "DJL_OFFLINE"),
        *("PYTHON_EXECUTABLE", "STANDARD_AUTO_INSTALL_REQ", "STANDARD_PIP_ARGS", "HF_HUB_OFFLINE"),
        *("TENSOR_PARALLEL_DEGREE", "PIPELINE_PARALLEL_DEGREE", "PREDICT_TIMEOUT", "MODEL_LOADING_TIMEOUT"),
        *("SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB", "SAGEMAKER_BIND_TO_PORT"),
        *("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_HEALTH_CHECK_OVERRIDE"),
        *("SAGEMAKER_SECURE_MODE", "SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS"),
    }
)
"""Those that count by themselves."""
_UPPER_CASE_NAME = re.compile(r"[A-Z0-9_]+")
_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
_LINE_END = re.compile(r"\r\n|\r|\n")
_COMMENT = re.compile(r"[ \t\f]*[#!]")
_CONTINUED = re.compile(r"(?<!\\)(\\\\)*\\\Z")
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Value:
    """A value as it was written, and where: "serving.properties: option.dtype", "environment: OPTION_DTYPE"."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class PropertiesFile:
    """What a serving.properties file says. A file with problems may hold further values."""

    values: Mapping[str, Value]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read_properties(path: Path) -> PropertiesFile:
    """Read a Java properties file; one that is not there is empty, one that cannot be read is a problem."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return PropertiesFile({})
    except OSError as error:
        return PropertiesFile({}, (f"{FILE_NAME} cannot be read: {error.strerror or type(error).__name__}",))
    return parse_properties(data)


def parse_properties(data: bytes) -> PropertiesFile:
    r"""Parse ISO-8859-1 text with \uXXXX escapes, comments and continued lines (lmi.md 2.2).

    Trailing blanks are kept. Of a key that occurs twice, the last value counts. A byte order mark, which Java takes for
    a part of the first key, does not count.
    """
    values: dict[str, Value] = {}
    lines: dict[str, int] = {}
    problems: list[str] = []
    warnings: list[str] = []
    if data.startswith(codecs.BOM_UTF8):
        data = data.removeprefix(codecs.BOM_UTF8)
        warnings.append(f"{FILE_NAME} begins with a byte order mark, which is ignored; LMI takes it for text")
    for line, key, text in _pairs(data.decode("iso-8859-1"), problems):
        if _NOT_TEXT.search(text) or not key.isprintable():
            problems.append(f"{FILE_NAME}, line {line}: a NUL, half a surrogate pair or a key that cannot be shown")
            continue
        if key in values and values[key].text != text:
            warnings.append(f"{FILE_NAME}, line {line}: {key} is in line {lines[key]} already; the last value counts")
        values[key], lines[key] = Value(text, f"{FILE_NAME}: {key}"), line
    if _looks_like_utf8(data):
        warnings.append(
            f"{FILE_NAME} seems to be UTF-8; as a Java properties file it is read as ISO-8859-1: "
            r"write other characters as \uXXXX"
        )
    return PropertiesFile(values, tuple(problems), tuple(warnings))


def _pairs(text: str, problems: list[str]) -> Iterator[tuple[int, str, str]]:
    """Line number, key and value of each entry."""
    for number, entry in _entries(text):
        try:
            for element in javaproperties.parse(entry):
                if isinstance(element, javaproperties.KeyValue):
                    yield number, element.key, element.value
        except javaproperties.InvalidUEscapeError as error:
            escape = "".join(character if character.isprintable() else "?" for character in error.escape)
            problems.append(
                f"{FILE_NAME}, line {number}: {escape} is not an escape; "
                r"allowed: \u and four hexadecimal digits (a backslash itself is written \\)"
            )


def _entries(text: str) -> Iterator[tuple[int, str]]:
    """The number of its first line and the text of each entry, with the lines that continue it."""
    lines = enumerate(_LINE_END.split(text), start=1)
    for number, line in lines:
        entry = line
        if not _COMMENT.match(line):
            while _CONTINUED.search(line):
                _, line = next(lines, (0, ""))
                entry += "\n" + line
        yield number, entry


def _looks_like_utf8(data: bytes) -> bool:
    if data.isascii():
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def read_environment(
    environ: Mapping[str, str], problems: list[str], further: Container[str] = (), flags: str = "\0"
) -> dict[str, Value]:
    """The variables that can matter: those of LMI, and `further` ones; without empty ones.

    A variable that begins with `flags` may be empty, and then is true.
    """
    variables: dict[str, Value] = {}
    for name, text in environ.items():
        is_flag = name.startswith(flags)
        if not (text or is_flag) or not (is_flag or name in VARIABLES or name in further or name.startswith(PREFIXES)):
            continue
        if _NOT_TEXT.search(text) or not name.isprintable():
            problems.append(f"environment: {ascii(name)[1:-1]} is not UTF-8 text")
            continue
        variables[name] = Value(text or "true", f"environment: {name}")
    return variables


def option_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Model keys from OPTION_* and ARGS_* (lmi.md 2.3)."""
    layer: dict[str, Value] = {}
    for name, value in variables.items():
        if name.startswith("OPTION_") and (rest := name.removeprefix("OPTION_")):
            _put(layer, _OPTION_KEYS.get(rest) or f"option.{_key(rest)}", value, problems)
        elif name.startswith("ARGS_") and (rest := name.removeprefix("ARGS_")):
            _put(layer, _key(rest), value, problems)
    return layer


def serving_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Server keys from SERVING_* (lmi.md 2.3)."""
    layer: dict[str, Value] = {}
    for name, value in variables.items():
        if name.startswith("SERVING_") and (rest := name.removeprefix("SERVING_")):
            _put(layer, rest.lower(), value, problems)
    return layer


def _key(name: str) -> str:
    return name.lower() if _UPPER_CASE_NAME.fullmatch(name) else name


def _put(layer: dict[str, Value], key: str, value: Value, problems: list[str]) -> None:
    earlier = layer.setdefault(key, value)
    if earlier.text != value.text:
        problems.append(f"{key} is set twice, to different values ({earlier.source}; {value.source}); give it once")


def sagemaker_model_layer(variables: Mapping[str, Value]) -> dict[str, Value]:
    """Model keys that SageMaker's variables overwrite (lmi.md 2.5)."""
    return {key: variables[name] for name, key in SAGEMAKER_MODEL_KEYS if name in variables}


def sagemaker_server_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Server keys that SageMaker's variables overwrite (lmi.md 2.5, sagemaker_hosting.md 11)."""
    layer: dict[str, Value] = {}
    if "SAGEMAKER_BIND_TO_PORT" in variables:
        layer["port"] = variables["SAGEMAKER_BIND_TO_PORT"]
    if "SAGEMAKER_MULTI_MODEL" in variables:
        layer["multi_model"] = variables["SAGEMAKER_MULTI_MODEL"]
    if "SAGEMAKER_HEALTH_CHECK_OVERRIDE" in variables:
        layer["workers_health_check"] = variables["SAGEMAKER_HEALTH_CHECK_OVERRIDE"]
    if "SAGEMAKER_MAX_REQUEST_SIZE" in variables:
        layer["max_request_size"] = variables["SAGEMAKER_MAX_REQUEST_SIZE"]
    elif megabytes := variables.get("SAGEMAKER_MAX_PAYLOAD_IN_MB"):
        if re.fullmatch("0*[0-9]{1,7}", megabytes.text.strip(), re.ASCII):
            # Batch transform says 0 for no limit.
            size = int(megabytes.text) * _MEBIBYTE or sys.maxsize
            layer["max_request_size"] = Value(str(size), megabytes.source)
        else:
            problems.append(
                f"max_request_size is {quoted(megabytes.source, megabytes.text)} ({megabytes.source}); "
                "allowed: an integer, in MiB; 0 for no limit"
            )
    return layer


def merged(*layers: Mapping[str, Value]) -> dict[str, Value]:
    """One layer of several, the most important first."""
    return {key: value for layer in reversed(layers) for key, value in layer.items()}
