"""The text of a setting, with its source, and how a message shows it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from engines.settings.parsers import TRUE

HIDDEN = "***"
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")  # Characters that no value may have.
_LONGEST_QUOTE = 200

# Names of settings whose whole value is a credential. Names such as `max_num_batched_tokens` do not match.
_SECRET_NAME = re.compile(r"(token|api_?keys?|password|passwd|secret|credentials?|access_?key)$", re.IGNORECASE)
_WHOLLY_HIDDEN = frozenset({"option.env"})
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{12,}"  # a Hugging Face token
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"  # an AWS access key
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password in a URL
)


def masked(name: str, text: str) -> str:
    """Return the text of a setting, with credentials replaced.

    The setting's name and the text itself show whether it holds a credential.
    """
    if text and (name in _WHOLLY_HIDDEN or _SECRET_NAME.search(name)):
        return HIDDEN
    return _SECRET_VALUE.sub(HIDDEN, text)


def quoted(name: str, text: str) -> str:
    """Return the `masked` text for a message: in quotes, on one line, and shortened."""
    shown = masked(name, text)
    if len(shown) > _LONGEST_QUOTE:
        shown = shown[:_LONGEST_QUOTE] + "..."
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


@dataclass(frozen=True, slots=True)
class Value:
    """The text of a value, and its source: "serving.properties: option.dtype" or "environment: OPTION_DTYPE"."""

    text: str
    source: str
    line: int = 0  # Of the file; 0: the value is not in a file.

    @property
    def place(self) -> str:
        """The source for a message that names the key."""
        return f"{self.source.partition(':')[0]}, line {self.line}" if self.line else self.source

    @property
    def word(self) -> str:
        return self.text.strip().lower()

    def describe(self, key: str) -> str:
        """Return `<key> is "<text>" (<source>)`, for a message."""
        return f"{key} is {quoted(key, self.text)} ({self.place})"


def is_true(value: Value | None) -> bool:
    """Return True if the value is one of the words for true."""
    return value is not None and value.word in TRUE
