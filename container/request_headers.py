"""Request headers as a handler sees them: names in the case in which their owners write them.

HTTP's names have no case and the server lower-cases them, but LMI handlers look some of them up as clients send them.
Source: contracts/lmi.md section 1.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_LOWER = ("x-request-id", "x-synchronous", "x-starting-token", "x-next-token", "x-max-items", "x-priority")
"""Names that LMI's own documentation writes so."""


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """All headers, in order, as text."""
    return tuple((_canonical(name), value.decode("latin-1")) for name, value in headers)


@lru_cache(maxsize=512)
def _canonical(name: bytes) -> str:
    text = name.decode("latin-1")
    if text in _LOWER or "_" in text:
        return text
    prefix = "x-amzn-sagemaker-"
    if text.startswith(prefix):
        return "X-Amzn-SageMaker-" + "-".join(map(str.capitalize, text.removeprefix(prefix).split("-")))
    return "-".join(map(str.capitalize, text.split("-")))
