"""From a model's url to where its settings are read from. Source: contracts/lmi.md sections 1.10 and 2.6."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from container.masking import quoted
from container.sources.s3_url import is_s3

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
