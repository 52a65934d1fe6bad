"""Hides credentials in what is shown: reports, logs, error messages."""

from __future__ import annotations

import json
import re

HIDDEN = "***"
_LONGEST_QUOTE = 200

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
