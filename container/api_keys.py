"""API keys (`SERVING_API_KEYS`): reads them from the settings, and looks for them in the headers of a request."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Self

from container.settings.values import names

Headers = Sequence[tuple[bytes, bytes]]

_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys, of which only digests are kept."""

    digests: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> Self:
        """Take the keys themselves."""
        return cls(tuple(sha256(key.encode()).digest() for key in dict.fromkeys(keys)))

    def taken_from(self, headers: Headers) -> Headers | None:
        """Return the headers without those that hold a key; None if no header holds one."""
        rest = [(name, value) for name, value in headers if not self._in(name, value)]
        return rest if len(rest) < len(headers) else None

    def _in(self, name: bytes, value: bytes) -> bool:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() != b"bearer":
                return False
        elif name == b"x-api-key":
            key = value
        else:
            return False
        digest = sha256(key.strip()).digest()
        # All are compared, so that the time does not tell which one it is.
        return sum(hmac.compare_digest(digest, known) for known in self.digests) > 0


def keys_in(text: str) -> tuple[str, ...]:
    """Return the keys of a setting: with commas between, or as a JSON array.

    Raises:
        ValueError: There is none, or one has other characters than visible ASCII.
    """
    keys = names(text)
    if not keys or not all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys):
        raise ValueError(text)
    return keys


def keys_in_file(path: str) -> tuple[str, ...]:
    """Return the keys of a file: one in each line; empty lines and those that begin with # do not count.

    Raises:
        ValueError: It cannot be read, has no key, or a line is none. The message repeats nothing of the file.
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
