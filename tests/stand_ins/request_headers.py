"""Headers of a call as the server gives them to contracts."""

from __future__ import annotations


def request_headers(*pairs: tuple[str, str]) -> dict[bytes, bytes]:
    """Return headers by their names in lower case. If several headers have the same name, the last one counts."""
    return {name.lower().encode(): value.encode("latin-1") for name, value in pairs}
