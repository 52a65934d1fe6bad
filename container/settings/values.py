"""The text of a setting, its source, and its form in messages."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from engines.settings.parsers import TRUE

HIDDEN = "***"
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")  # Characters that no value may contain.
_LONGEST_QUOTE = 200

# `_NAMES` matches the ends of credentials' names, but not names such as `max_num_batched_tokens`, `eos_token_id` and
# `image_token`. A name with a word of `_NO_CREDENTIAL` before `token` is not the name of a credential.
_NO_CREDENTIAL = "audio|bos|cls|end|eos|image|mask|media|pad|sep|start|stop|unk|video|vision"
_NAMES = (
    r"((api|access|secret|private)[_-]?keys?|passwords?|passwd|secrets?|credentials?|authorization|signature|"
    + "".join(rf"(?<!{word}[_-])" for word in _NO_CREDENTIAL.split("|"))
    + r"token|(?<![\w-])sig)"
)
_SECRET_NAME = re.compile(rf"{_NAMES}$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    # user:password in a URL. Passwords may contain slashes and more than one `@`.
    r"(?<=://)[^\s/@:]{0,200}:[^\s\"',]{0,1000}(?=@)|(?<=://)[^\s/]{1,1000}(?=@)"
    r"|hf_[A-Za-z0-9]{12,}"  # a Hugging Face token
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"  # an AWS access key
    r"|\b(sk|glpat|nvapi)-[A-Za-z0-9_-]{16,}|\b(gh[a-z]|github_pat)_[A-Za-z0-9_]{20,}"
    r"|(?<=[Bb]earer )[^\s\"']+"
)
# Matches credentials in text that is not JSON. A credential is a value of an argument (`--api-key KEY KEY`), of an
# object's member, or of a query's parameter. If the value is an object or an array, all text after it is hidden, too.
_SECRET_MEMBER = re.compile(
    rf"(?P<argument>--([a-z]{{1,20}}-){{0,3}}{_NAMES}[\"'\\,\s]{{1,9}}).+?(?=[\"'\\,\s]--|\Z)"
    rf"|(?P<name>{_NAMES}[\"'\\]{{0,9}}\s{{0,9}}[=:]\s{{0,9}}\\{{0,9}}[\"']?)"
    r"((?<=\")(\\.|[^\"\\])+|(?<=')([^']|'')+|[\[{](?!\s*[\]}]).*"
    r"|((Basic|Bearer) +)?(?!(null|none|true|false)\b)[^\s,;&{}[\]\"'\\]+)",
    re.IGNORECASE | re.DOTALL,
)


def masked(name: str, text: str) -> str:
    """Return the text of a setting with credentials replaced.

    Credentials are recognized by the setting's name and by the text itself.
    """
    if text and (name == "option.env" or _SECRET_NAME.search(name)):
        return HIDDEN
    try:
        value = json.loads(text)
        if (shown := _masked_json(value)) != value:
            return json.dumps(shown)
    except (ValueError, RecursionError):
        pass
    text = _SECRET_VALUE.sub(HIDDEN, text)
    return _SECRET_MEMBER.sub(lambda found: (found["argument"] or found["name"]) + HIDDEN, text)


def _masked_json(value: Any, name: str = "") -> Any:
    """Return a JSON value with credentials replaced. `name` is the key or the argument to which the value belongs."""
    if _SECRET_NAME.search(name) and not isinstance(value, bool | None) and value not in ("", [], {}):
        return HIDDEN
    if isinstance(value, str):
        return masked("", value)
    if isinstance(value, dict):
        return {masked("", key): _masked_json(part, key) for key, part in value.items()}
    if not isinstance(value, list):
        return value
    shown, argument = [], ""
    for part in value:
        is_argument = isinstance(part, str) and part.startswith("--")
        shown.append(_masked_json(part, "" if is_argument else argument))
        argument = part if is_argument else argument
    return shown


def quoted(name: str, text: str) -> str:
    """Return the text for a message: masked, shortened, quoted, and on one line."""
    shown = masked(name, text)
    if len(shown) > _LONGEST_QUOTE:
        shown = shown[:_LONGEST_QUOTE] + "..."
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


@dataclass(frozen=True, slots=True)
class Value:
    """The text of a value, and its source: "serving.properties: option.dtype" or "environment: OPTION_DTYPE"."""

    text: str
    source: str
    line: int = 0  # The number of the line in the file. 0 if the value is not from a file.

    @property
    def place(self) -> str:
        """The source of the value, for a message that itself names the key."""
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
