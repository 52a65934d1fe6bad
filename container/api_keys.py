"""API keys (`SERVING_API_KEYS`): reads them from the settings, and finds them in the headers of a request."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Self

from engines.settings.parsers import json_value

Headers = Sequence[tuple[bytes, bytes]]

_KEY = re.compile(r"[\x21-\x7e]+")
_SALT = b"slipway cache salt "  # Makes a key's cache salt differ from the key's digest.


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """A set of keys. Only their SHA-256 digests are stored."""

    digests: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> Self:
        """Return the digests of these keys."""
        return cls(tuple(sha256(key.encode()).digest() for key in dict.fromkeys(keys)))

    def taken_from(self, headers: Headers) -> tuple[Headers, str] | None:
        """Remove the headers that contain a key.

        Returns:
            The other headers, and the key's cache salt, a string that differs for each key. None if no header contains
            a key.
        """
        rest, held = [], b""
        for name, value in headers:
            key = _key_in(name, value)
            if key is not None and self._has(key):
                held = key
            else:
                rest.append((name, value))
        return (rest, sha256(_SALT + held).hexdigest()) if held else None

    def _has(self, key: bytes) -> bool:
        digest = sha256(key).digest()
        # All digests are compared, so that the time does not reveal which one matches.
        return sum(hmac.compare_digest(digest, known) for known in self.digests) > 0


def _key_in(name: bytes, value: bytes) -> bytes | None:
    """Return the part of a header that may be a key. None if the header cannot contain a key."""
    if name == b"authorization":
        scheme, _, key = value.partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else None
    return value.strip() if name == b"x-api-key" else None


def keys_in(text: str) -> tuple[str, ...]:
    """Parse a setting: keys separated by commas, or a JSON array of keys.

    Raises:
        ValueError: The setting is empty, or a key contains characters other than visible ASCII.
    """
    keys = json_value(text) if text.lstrip().startswith("[") else [key.strip().strip("\"'") for key in text.split(",")]
    keys = [key for key in keys if key != ""]
    if not keys or not all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys):
        raise ValueError(text)
    return tuple(keys)


def keys_in_file(path: str) -> tuple[str, ...]:
    """Read a file with one key per line.

    Empty lines and lines that begin with # are ignored.

    Raises:
        ValueError: The file cannot be read, has no key, or has a line that is not a key. The message quotes nothing
            from the file.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        if not _KEY.fullmatch(line):
            raise ValueError(f"line {number} is no key; expected visible ASCII characters without blanks")
        keys.append(line)
    if not keys:
        raise ValueError("it has no key")
    return tuple(keys)
