"""What kind of content a Content-Type header announces.

The order is that of contracts/lmi.md section 3.1; JSON lines, real npy files and MessagePack are added to it.
"""

from __future__ import annotations

from enum import Enum, auto


class Kind(Enum):
    """How a body is read."""

    UNKNOWN = auto()
    """No content type was given."""
    JSON_LINES = auto()
    JSON = auto()
    CSV = auto()
    PLAIN = auto()
    TEXT = auto()
    """Any other `text/*`."""
    IMAGE = auto()
    AUDIO = auto()
    NPZ = auto()
    ND_LIST = auto()
    NPY = auto()
    FORM = auto()
    MSGPACK = auto()
    BYTES = auto()


_EXACT = {
    "application/jsonlines": Kind.JSON_LINES,
    "application/x-jsonlines": Kind.JSON_LINES,
    "application/x-ndjson": Kind.JSON_LINES,
    "tensor/ndlist": Kind.ND_LIST,
    "application/x-npy": Kind.NPY,
    "application/x-www-form-urlencoded": Kind.FORM,
    "application/msgpack": Kind.MSGPACK,
    "application/x-msgpack": Kind.MSGPACK,
}
_CONTAINED = {
    "application/json": Kind.JSON,
    "text/csv": Kind.CSV,
    "text/plain": Kind.PLAIN,
    "tensor/npz": Kind.NPZ,
}
_PREFIXES = {
    "text/": Kind.TEXT,
    "image/": Kind.IMAGE,
    "audio/": Kind.AUDIO,
}


def kind_of(content_type: str | None) -> Kind:
    """The kind of content; parameters such as `; charset=utf-8` and the case of letters do not matter."""
    if not content_type:
        return Kind.UNKNOWN
    text = content_type.strip().lower()
    exact = _EXACT.get(text.partition(";")[0].rstrip())
    if exact:
        return exact
    for part, kind in _CONTAINED.items():
        if part in text:
            return kind
    return next((kind for prefix, kind in _PREFIXES.items() if text.startswith(prefix)), Kind.BYTES)
