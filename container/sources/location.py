"""The models of S3 that the settings name: opened once each, so that settings and code can be read from them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from container.settings.properties import FILE_NAME, Value, quoted
from container.sources.remote_model import RemoteModel, open_model
from container.sources.s3_url import S3Url, is_s3
from container.sources.source_error import SourceError

DEFAULT_MODEL_DIR = Path("/opt/ml/model")
CONFIG_FILE = "config.json"

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_NON_WORD = re.compile(r"\W", re.ASCII)
_NO_PLACE = "is not served by this version of Slipway; give s3://, a hub id or a local directory"
_MARKS = (FILE_NAME, CONFIG_FILE, "model.py")


class ModelNotFound(Exception):
    """There is no model where one was named; the message says what may be named."""


def find_model_dir(given: Path | str | None, store: Value | None) -> Path:
    """The directory with serving.properties or the model: absolute, and there unless it is the default one.

    A directory that holds nothing but one directory with a model stands for that one, as in archives that were made of
    a directory.

    Raises:
        ModelNotFound: a directory was named that is none, or it holds several models.
    """
    directories = find_model_dirs(given, store)
    if len(directories) > 1:
        listed = ", ".join(directory.name for directory in directories)
        raise ModelNotFound(f"model directory: {directories[0].parent} holds several models ({listed}): name one")
    return directories[0]


def find_model_dirs(given: Path | str | None, store: Value | None) -> tuple[Path, ...]:
    """The same, where several models are allowed: one directory each, in the order of their names.

    Source: contracts/lmi.md section 2.6.

    Raises:
        ModelNotFound: a directory was named that is none.
    """
    if given is None and store is None:
        return _descend(DEFAULT_MODEL_DIR)
    source = "--model-dir" if given is not None else (store.source if store else "")
    if url := _URL.match(str(given) if given is not None else store.text.strip() if store else ""):
        raise ModelNotFound(f"model directory ({source}): {url.group(1)}:// {_NO_PLACE}")
    path = Path(os.path.abspath(given if given is not None else store.text.strip() if store else ""))
    if not os.path.isdir(path):
        raise ModelNotFound(f"model directory ({source}): there is no directory {path}")
    return _descend(path)


def _descend(path: Path) -> tuple[Path, ...]:
    try:
        names = [name for name in os.listdir(path) if not name.startswith(".")]
    except OSError:
        return (path,)
    if not all(os.path.isdir(path / name) for name in names):
        return (path,)
    models = sorted(path / name for name in names if any(os.path.isfile(path / name / mark) for mark in _MARKS))
    return tuple(models) if len(models) > 1 or len(models) == len(names) == 1 else (path,)


def is_store_of(text: str, directories: tuple[Path, ...]) -> bool:
    """Whether `text` is the directory that these models are in: HF_MODEL_ID may well be /opt/ml/model, which then names
    no further model (contracts/lmi.md 2.6)."""
    path = Path(os.path.abspath(text.strip()))
    return os.path.isdir(path) and path not in directories and _descend(path) == directories


def is_model_dir(path: Path) -> bool:
    """Whether there is a model, settings or code of one."""
    return any(os.path.isfile(path / mark) for mark in _MARKS)


def has_model(model_dir: Path) -> bool:
    """Whether the directory itself is a Hugging Face model."""
    return os.path.isfile(model_dir / CONFIG_FILE)


def is_hub_id(text: str) -> bool:
    """Whether it may be the name of a model on the hub: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(text) is not None


def resolve_model_id(text: str, model_dir: Path) -> str:
    """What the engine loads: an absolute path, or a hub id.

    Raises:
        ModelNotFound: neither, or a path where nothing is.
    """
    if url := _URL.match(text):
        raise ModelNotFound(f"{url.group(1)}:// {_NO_PLACE}")
    if os.path.exists(model_dir / text):
        return str(model_dir / text)
    if os.path.isabs(text):
        raise ModelNotFound("there is no such directory")
    if not is_hub_id(text):
        raise ModelNotFound("allowed: a hub id (name or owner/name), or a directory that is there")
    return text


def model_name(model_id: str, model_dir: Path, named_by_variable: bool) -> str:
    """The model's name in routes: that of its directory, or its hub id, with non-word characters replaced by `_`.

    As in LMI, HF_MODEL_ID names a model of its own, whereas option.model_id belongs to the model directory.
    """
    if not named_by_variable and _occupied(model_dir):
        return _word(model_dir.name)
    return _word(Path(model_id).name if os.path.isabs(model_id) else model_id)


def name_of_url(url: str) -> str:
    """The name of a model that has none: the last segment of its url (contracts/lmi.md 2.6)."""
    return _word(url.rstrip("/").rpartition("/")[2])


def _occupied(model_dir: Path) -> bool:
    try:
        return any(not name.startswith(".") for name in os.listdir(model_dir))
    except OSError:
        return False


def _word(text: str) -> str:
    return _NON_WORD.sub("_", text) or "model"


_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
_LOCAL_HOSTS = frozenset({"", "localhost"})


class UrlNotFound(Exception):
    """There is no model at a url; the message names it and says what may be given."""


def model_place(url: str) -> Path | str:
    """What a url names: a directory (an absolute path, or `file://` and one), or the `s3://` url itself.

    A model of S3 is opened when its settings are read (`load_settings`), which says what is wrong with it.

    Raises:
        UrlNotFound: another kind of url, or nothing is there.
    """
    if is_s3(url):
        return url
    path = _path(url)
    if path is None or not os.path.isabs(path) or "\0" in path:
        raise UrlNotFound(f"url is {quoted('url', url)}; allowed: an absolute path, file:// and one, or s3://")
    if not os.path.isdir(path):
        raise UrlNotFound(f"url is {quoted('url', url)}: there is no such directory")
    return Path(os.path.abspath(path))


def _path(url: str) -> str | None:
    if not _SCHEME.match(url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    return unquote(parts.path) if parts.scheme == "file" and parts.netloc in _LOCAL_HOSTS else None


__all__ = ["RemoteModels", "SourceError", "is_s3"]


class RemoteModels:
    """What has been opened, by URL."""

    def __init__(self, downloads: Path, *, offline: bool) -> None:
        self._downloads, self._offline = downloads, offline
        self._opened: dict[str, RemoteModel] = {}

    def open(self, url: str) -> Path:
        """The directory of this model, whose weights are fetched later.

        Raises:
            SourceError: it cannot be had.
        """
        key = str(S3Url.parse(url))
        if key not in self._opened:
            self._opened[key] = open_model(key, self._downloads, offline=self._offline)
        return self._opened[key].directory

    def has(self, url: str) -> bool:
        """Whether it has been opened."""
        try:
            return str(S3Url.parse(url)) in self._opened
        except SourceError:
            return False

    @property
    def opened(self) -> tuple[RemoteModel, ...]:
        """All of them."""
        return tuple(self._opened.values())
