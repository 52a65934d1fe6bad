"""A handler's properties as response headers. Source: contracts/lmi.md section 1.5."""

from __future__ import annotations

import logging
import re

from handlers.workers.runtime.messages import Properties

logger = logging.getLogger("handlers.workers")

Headers = tuple[tuple[str, str], ...]

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ATTRIBUTES = re.compile(r"[\x20-\x7e]{0,1024}")
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
    characters are taken out of values; characters beyond Latin-1 become question marks, as LMI sends them. Custom
    attributes that SageMaker would refuse with the whole reply are left out, too (sagemaker_hosting.md section 3).
    """
    content_type = ""
    headers: dict[str, tuple[str, str]] = {}
    for name, value in properties:
        text = _CONTROL.sub(" ", value).strip().encode("latin-1", "replace").decode("latin-1")
        lower = name.lower()
        if lower == "content-type":
            content_type = text
        elif lower == _CUSTOM_ATTRIBUTES and not _ATTRIBUTES.fullmatch(text):
            logger.warning("the handler's %s is left out: it must be at most 1024 visible ASCII characters", name)
        elif _NAME.fullmatch(name) and lower not in _FRAMING:
            headers[lower] = (name, text)
    return content_type, tuple(headers.values())
