"""What is wrong with a JSON text that msgspec does not take, in words for its sender."""

from __future__ import annotations

import re

_TRUNCATED = "Input data was truncated"
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\?\Z|\\u[0-9a-fA-F]{0,3}\Z|\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""The first half of a character beyond 16 bits, without its second half; a text that ends here may be cut off."""


def json_fault(text: bytes | str, error: Exception) -> str:
    """The reason that `error` gives for refusing `text`, corrected where msgspec's own misleads.

    Near the end of a text msgspec reports half a surrogate pair as a text that was cut off.
    """
    reason = str(error)
    if reason != _TRUNCATED:
        return reason
    found = _LONE_SURROGATE.search(text.encode("utf-8", "replace") if isinstance(text, str) else text)
    if found is None:
        return reason
    return f"JSON is malformed: {found[1].decode()} is half of a utf-16 surrogate pair (byte {found.start(1)})"
