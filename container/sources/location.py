"""The location of a model: a directory on this machine, a folder on S3, or a name on the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

DEFAULT_MODEL_DIR = Path("/opt/ml/model")
CONFIG_FILE = "config.json"
# A directory with one of these files is a model directory.
_MODEL_FILES = ("serving.properties", CONFIG_FILE, "model.py")

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(//)?", re.IGNORECASE)
_LOCAL_HOSTS = frozenset({"", "localhost"})
_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_NON_WORD = re.compile(r"\W", re.ASCII)

_S3_URL = re.compile(r"s3://([^/]+)/*(.*)", re.IGNORECASE)
SETTINGS_SECONDS = 300.0  # The time limit for listing a model on S3 and fetching its small files.


class ModelNotFound(Exception):
    """There is no model at the given place. The message names the allowed values."""


class SourceError(Exception):
    """A remote model cannot be fetched. The message names the value and the reason."""


class FetchTimeout(SourceError):
    """The download did not finish in time. Complete files are kept."""


# Directories


def existing_directory(text: str) -> Path:
    """Return the absolute path of a directory.

    Raises:
        ModelNotFound: The directory does not exist.
    """
    _refuse_url(text)
    path = Path(os.path.abspath(text.strip()))
    if not os.path.isdir(path):
        raise ModelNotFound(f"there is no directory {path}")
    return path


def models_in(path: Path) -> tuple[Path, ...]:
    """Return the model directories to load for `path`, sorted by name.

    If `path` contains only subdirectories, as LMI's model store does, the subdirectories that are model directories are
    returned. `path` itself is returned if it contains files, if no subdirectory is a model directory, or if only one of
    several is.
    """
    try:
        names = [name for name in os.listdir(path) if not name.startswith(".")]
    except OSError:
        return (path,)
    if not all(os.path.isdir(path / name) for name in names):
        return (path,)
    models = sorted(path / name for name in names if is_model_dir(path / name))
    return tuple(models) if len(models) > 1 or len(models) == len(names) == 1 else (path,)


def is_store_of(text: str, directories: tuple[Path, ...]) -> bool:
    """Return whether `text` is the directory that contains these model directories.

    HF_MODEL_ID may name the directory that contains the models, such as /opt/ml/model. The variable then adds no model.
    """
    path = Path(os.path.abspath(text.strip()))
    return os.path.isdir(path) and path not in directories and models_in(path) == directories


def is_model_dir(path: Path) -> bool:
    """Return whether the directory contains a model, or a model's settings or code."""
    return any(os.path.isfile(path / name) for name in _MODEL_FILES)


def model_fault(directory: Path) -> str:
    """Return the reason why an engine cannot load a directory. Empty if it can.

    Only file names and the content of `config.json` are checked. Directories without `config.json` may be in Mistral's
    format or in GGUF.
    """
    try:
        names = os.listdir(directory)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if any(name.startswith("models--") for name in names):
        return "it is the root of the hub's cache; give the model's id on the hub (owner/name)"
    if {"refs", "snapshots"} <= set(names):
        return "it is a model's folder in the hub's cache; give the model's id on the hub, or a directory in snapshots/"
    if CONFIG_FILE not in names:
        others = "params.json" in names or any(name.lower().endswith(".gguf") for name in names)
        return "" if others else f"it has no {CONFIG_FILE}"
    return json_file_fault(directory / CONFIG_FILE)


def json_file_fault(path: Path) -> str:
    """Return the reason why a file cannot be read as a JSON object. Empty if it can be read."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        return f"its {path.name} cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"its {path.name} is not JSON in UTF-8: {error}"
    return "" if isinstance(content, dict) else f"its {path.name} is not a JSON object"


def has_model(model_dir: Path) -> bool:
    """Return True if the directory itself is a Hugging Face model."""
    return os.path.isfile(model_dir / CONFIG_FILE)


# Names and URLs


def is_hub_id(text: str) -> bool:
    """Return whether `text` may name a model on the hub: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(text) is not None


def resolve_model_id(text: str, model_dir: Path) -> str:
    """Return the model for the engine: a hub id, or a path.

    Raises:
        ModelNotFound: The text is neither a hub id nor an existing path.
    """
    _refuse_url(text)
    if os.path.exists(model_dir / text):
        return str(model_dir / text)
    if os.path.isabs(text):
        raise ModelNotFound("there is no such directory")
    if not is_hub_id(text):
        raise ModelNotFound("allowed: a hub id (name or owner/name), or a directory that is there")
    return text


def model_name(model_id: str, model_dir: Path, named_by_variable: bool) -> str:
    """Return the model's name in routes: the name of its directory or its hub id. `_` replaces non-word characters.

    As in LMI, a model that HF_MODEL_ID selects (`named_by_variable`) is named after its id. A model that
    option.model_id selects is named after the model directory.
    """
    if not named_by_variable and _has_files(model_dir):
        return _as_word(model_dir.name)
    return _as_word(Path(model_id).name if os.path.isabs(model_id) else model_id)


def name_of_url(url: str) -> str:
    """Return the default name of a model: the last segment of its URL."""
    return _as_word(url.rstrip("/").rpartition("/")[2])


def path_of_url(url: str) -> Path | None:
    """Return the absolute path that a model's URL refers to. The URL may be a plain path or a `file://` URL.

    Return None for other URLs and for relative paths.
    """
    path = url
    if _SCHEME.match(url):
        try:
            parts = urlsplit(url)
        except ValueError:
            return None
        if parts.scheme != "file" or parts.netloc not in _LOCAL_HOSTS:
            return None
        path = unquote(parts.path)
    return Path(os.path.abspath(path)) if os.path.isabs(path) and "\0" not in path else None


def _refuse_url(text: str) -> None:
    if (found := _SCHEME.match(text)) is not None and found[2]:
        served = "is not served by this version of Slipway; give s3://, a hub id or a local directory"
        raise ModelNotFound(f"{found[1]}:// {served}")


def _has_files(model_dir: Path) -> bool:
    try:
        return any(not name.startswith(".") for name in os.listdir(model_dir))
    except OSError:
        return False


def _as_word(text: str) -> str:
    return _NON_WORD.sub("_", text) or "model"


# S3


def is_s3(text: str) -> bool:
    """Return whether `text` begins with `s3://`, in upper or lower case."""
    return text.strip()[:5].lower() == "s3://"


@dataclass(frozen=True, slots=True)
class S3Url:
    """A folder in a bucket: `s3://bucket/prefix/`."""

    bucket: str
    prefix: str  # The prefix without leading and trailing slashes. Empty for the whole bucket.

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key_prefix}"

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2] or self.bucket

    @property
    def key_prefix(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""

    @classmethod
    def parse(cls, text: str) -> S3Url:
        """Return the folder that `text` names. The trailing slash is optional.

        Raises:
            SourceError: The text is not an S3 URL.
        """
        found = _S3_URL.fullmatch(text.strip())
        if found is None or not found[0].isprintable():
            raise SourceError("allowed: s3://bucket/prefix/")
        return cls(found[1], found[2].strip("/"))
