"""One log line for each request served."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("slipway.access")


def log_request(scope: dict[str, Any], request_id: str, status: int, seconds: float, size: int) -> None:
    """Log method, path, status, duration and size; never a query string, a prompt or an answer."""
    logger.info(
        "%s %s %d %.1f ms %d bytes",
        scope["method"],
        # As it was sent: decoded it may have line ends, and forge lines of this log.
        scope["raw_path"].decode("ascii", "backslashreplace"),
        status,
        seconds * 1000,
        size,
        extra={"request_id": request_id},
    )
