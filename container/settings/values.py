"""The text of a setting, its source, and its form in messages."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from engines.settings.parsers import TRUE

HIDDEN = "***"
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")  # Characters that no value may contain.
_LONGEST_QUOTE = 200

# Words at the end of a credential's name. Names such as `max_num_batched_tokens` and `eos_token_id` do not match.
_WORDS = r"api[_-]?keys?|(access|secret|private)[_-]?key|password|passwd|secret|credentials?|authorization|signature"
_SECRET_NAME = re.compile(rf"(token|{_WORDS})$", re.IGNORECASE)  # The whole value is a credential.
_WHOLLY_HIDDEN = frozenset({"option.env"})
_SECRET_VALUE = re.compile(
    # user:password in a URL. Passwords may contain slashes and more than one `@`.
    r"(?<=://)[^\s/@:]{0,200}:[^\s\"']{0,1000}(?=@)|(?<=://)[^\s/]{1,1000}(?=@)"
    r"|hf_[A-Za-z0-9]{12,}"  # a Hugging Face token
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"  # an AWS access key
    r"|\b(sk|glpat|nvapi)-[A-Za-z0-9_-]{16,}|\b(gh[a-z]|github_pat)_[A-Za-z0-9_]{20,}"
    r"|(?<=[Bb]earer )[^\s\"']+"
)
# A member of JSON, of a query or of an argument list (`--api-key KEY`) that is named like a credential.
_TOKEN = r"(access|api|auth|hf|hub|refresh|security|session)[_-]?token|(?<![\w-])token|(?<![\w-])sig"
_SECRET_MEMBER = re.compile(
    rf"(?P<name>(({_WORDS}|{_TOKEN})[\"'\\]{{0,9}}\s{{0,9}}[=:]\s{{0,9}}"
    rf"|--([a-z]{{1,20}}-){{0,3}}({_WORDS}|token)[\"'\\,\s]{{1,9}})\\{{0,9}}[\"']?)"
    r"((?<=\")(\\.|[^\"\\])*|(?<=')[^']*|\[[^]]{0,4000}\]|((Basic|Bearer) +)?[^\s,;&}\"'\\]+)",
    re.IGNORECASE,
)


def masked(name: str, text: str) -> str:
    """Return the text of a setting with credentials replaced.

    Credentials are recognized by the setting's name and by the text itself.
    """
    if text and (name in _WHOLLY_HIDDEN or _SECRET_NAME.search(name)):
        return HIDDEN
    return _SECRET_MEMBER.sub(rf"\g<name>{HIDDEN}", _SECRET_VALUE.sub(HIDDEN, text))


def quoted(name: str, text: str) -> str:
    """Return the `masked` text for a message: quoted, on one line, and shortened."""
    shown = masked(name, text)
    if len(shown) > _LONGEST_QUOTE:
        shown = shown[:_LONGEST_QUOTE] + "..."
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


@dataclass(frozen=True, slots=True)
class Value:
    """The text of a value, and its source: "serving.properties: option.dtype" or "environment: OPTION_DTYPE"."""

    text: str
    source: str
    line: int = 0  # The line in the file. 0: the value is not in a file.

    @property
    def place(self) -> str:
        """The source, for a message that names the key."""
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
