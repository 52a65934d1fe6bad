"""The headers of a refusal that tell the client about the connection and about its next attempt."""

from __future__ import annotations

from container.http.reply import Headers
from engines.errors import BodyTimeout, BodyTooLarge, NotReady, Overloaded, RequestError


def connection_headers(error: RequestError, *, body_read: bool) -> Headers:
    """Return the `connection` and `retry-after` headers of a refusal.

    Args:
        error: The reason for the refusal.
        body_read: Whether the whole body was read, so that the connection can serve the next request.
    """
    match error:
        case NotReady():
            return [(b"retry-after", b"5"), (b"connection", b"close")]
        case BodyTooLarge() | BodyTimeout() | Overloaded() if not body_read:
            return [(b"connection", b"close")]  # The rest of the body is never read.
        case _:
            return []
