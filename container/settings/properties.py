"""The texts of settings with their sources: serving.properties, and the environment in layers of keys.

The rules are LMI's: which variable sets which key. Nothing is converted here; `container.settings.options` and
`server_options` say what a value may be.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import javaproperties

from container.settings.parsers import TRUE

FILE_NAME = "serving.properties"
HIDDEN = "***"
_LONGEST_QUOTE = 200
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
"""Characters that no value may have."""

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


@dataclass(frozen=True, slots=True)
class Value:
    """A value as it was written, and where: "serving.properties: option.dtype", "environment: OPTION_DTYPE"."""

    text: str
    source: str

    @property
    def word(self) -> str:
        """The text in lower case, without blanks at its ends."""
        return self.text.strip().lower()

    def describe(self, key: str) -> str:
        """`<key> is "<text>" (<source>)`, for a message."""
        return f"{key} is {quoted(key, self.text)} ({self.source})"


def is_true(value: Value | None) -> bool:
    """Whether there is a value, and it says yes."""
    return value is not None and value.word in TRUE


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
    r"""Parse ISO-8859-1 text with \uXXXX escapes, comments and continued lines.

    Trailing blanks are kept. Of a key that occurs twice, the last value counts. A byte order mark, which Java takes for
    part of the first key, is skipped.
    """
    values: dict[str, Value] = {}
    lines: dict[str, int] = {}
    problems: list[str] = []
    warnings: list[str] = []
    if data.startswith(codecs.BOM_UTF8):
        data = data.removeprefix(codecs.BOM_UTF8)
        warnings.append(f"{FILE_NAME} begins with a byte order mark, which is ignored; LMI takes it for text")
    for line, key, text in _entries(data.decode("iso-8859-1"), problems):
        if NOT_TEXT.search(text) or not key.isprintable():
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


def _entries(text: str, problems: list[str]) -> Iterator[tuple[int, str, str]]:
    """Number of the first line, key and value of each entry; an entry with a wrong escape becomes a problem."""
    stream = io.StringIO(text, newline=None)
    text, line, position = stream.getvalue(), 1, 0
    while position < len(text):
        try:
            element = next(javaproperties.parse(stream))  # reads the lines of one entry
            if isinstance(element, javaproperties.KeyValue):
                yield line, element.key, element.value
        except javaproperties.InvalidUEscapeError as error:
            escape = "".join(character if character.isprintable() else "?" for character in error.escape)
            problems.append(
                f"{FILE_NAME}, line {line}: {escape} is not an escape; "
                r"allowed: \u and four hexadecimal digits (a backslash itself is written \\)"
            )
        line += text.count("\n", position, stream.tell())
        position = stream.tell()


def _looks_like_utf8(data: bytes) -> bool:
    if data.isascii():
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


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
"""SageMaker's variables that overwrite a key of the model."""
_SAGEMAKER_SERVER_KEYS = (
    ("SAGEMAKER_BIND_TO_PORT", "port"),
    ("SAGEMAKER_MULTI_MODEL", "multi_model"),
    ("SAGEMAKER_HEALTH_CHECK_OVERRIDE", "workers_health_check"),
    ("SAGEMAKER_MAX_REQUEST_SIZE", "max_request_size"),
)
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
"""Server keys that are the default of a model's key."""
_OPTION_KEYS = {"ENTRYPOINT": "option.entryPoint", "ENGINE": "engine"}
_UPPER_CASE_NAME = re.compile(r"[A-Z0-9_]+")
_MEBIBYTE = 1 << 20


def option_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Model keys from OPTION_* and ARGS_*."""
    layer: dict[str, Value] = {}
    for name, value in variables.items():
        if name.startswith("OPTION_") and (rest := name.removeprefix("OPTION_")):
            _put(layer, _OPTION_KEYS.get(rest) or f"option.{_key(rest)}", value, problems)
        elif name.startswith("ARGS_") and (rest := name.removeprefix("ARGS_")):
            _put(layer, _key(rest), value, problems)
    return layer


def serving_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Server keys from SERVING_*."""
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
    """Model keys that SageMaker's variables overwrite."""
    return {key: variables[name] for name, key in SAGEMAKER_MODEL_KEYS if name in variables}


def sagemaker_server_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Server keys that SageMaker's variables overwrite."""
    layer = {key: variables[name] for name, key in _SAGEMAKER_SERVER_KEYS if name in variables}
    megabytes = variables.get("SAGEMAKER_MAX_PAYLOAD_IN_MB")
    if megabytes is None or "max_request_size" in layer:
        return layer
    if re.fullmatch("0*[0-9]{1,7}", megabytes.text.strip(), re.ASCII):
        size = int(megabytes.text) * _MEBIBYTE or sys.maxsize  # batch transform says 0 for no limit
        layer["max_request_size"] = Value(str(size), megabytes.source)
    else:
        problems.append(f"{megabytes.describe('max_request_size')}; allowed: an integer, in MiB; 0 for no limit")
    return layer
