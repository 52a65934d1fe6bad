"""Headers of replies: those that LMI's routes carry, and CORS. Source: contracts/lmi.md sections 1.5 and 1.12."""

from __future__ import annotations

from container.push import Headers
from container.settings import ServerSettings

NO_CACHE: Headers = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
]


def cors_headers(settings: ServerSettings) -> Headers:
    """The CORS headers that the settings ask for."""
    cors = {
        b"access-control-allow-origin": settings.cors_allowed_origin,
        b"access-control-allow-methods": settings.cors_allowed_methods,
        b"access-control-allow-headers": settings.cors_allowed_headers,
    }
    return [(name, value.encode("latin-1")) for name, value in cors.items() if value]
