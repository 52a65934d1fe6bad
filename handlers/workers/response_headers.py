"""A handler's properties as response headers. Source: contracts/lmi.md section 1.5."""

from __future__ import annotations

import re

from handlers.workers.runtime.messages import Properties

Headers = tuple[tuple[str, str], ...]

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
# How the reply is framed is the server's business. Handlers that echo the request's headers send these, too.
_FRAMING = frozenset(
    {
        *("connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        "upgrade",
    }
)


def response_headers(properties: Properties) -> tuple[str, Headers]:
    """The content type, empty if there is none, and the other headers.

    Left out is what cannot be sent: names that are no token, and headers that say how the reply is framed. Control
    characters are taken out of values; characters beyond Latin-1 become question marks, as LMI sends them.
    """
    content_type = ""
    headers: dict[str, tuple[str, str]] = {}
    for name, value in properties:
        text = _CONTROL.sub(" ", value).strip().encode("latin-1", "replace").decode("latin-1")
        lower = name.lower()
        if lower == "content-type":
            content_type = text
        elif _NAME.fullmatch(name) and lower not in _FRAMING:
            headers[lower] = (name, text)
    return content_type, tuple(headers.values())
