"""SageMaker's telemetry log: the records that are metrics, in SageMaker's form."""

from __future__ import annotations

import copy
import logging
from collections import Counter

from djl_python import __version__


class SMLogFilter(logging.Filter):
    """Lets records `Tag: metric name: value unit` through, rewritten; others are dropped."""

    sm_log_markers = ("ModelServerError", "UserScriptError", "SysHealth", "ModelServerTelemetry")

    def __init__(self) -> None:
        super().__init__()
        self.counter: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> logging.LogRecord | bool:  # type: ignore[override]
        """The rewritten record, or False. A record with a known tag that is malformed is logged as a warning."""
        message = record.getMessage()
        if not message.startswith(tuple(f"{marker}:" for marker in self.sm_log_markers)):
            return False
        try:
            text = self._rewrite(message)
        except ValueError as error:
            logging.warning("Forwarding %r failed: %s", message, error)
            return False
        rewritten = copy.copy(record)
        rewritten.msg, rewritten.args = text, None
        return rewritten

    def _rewrite(self, message: str) -> str:
        parts = [part.strip() for part in message.split(":")]
        if len(parts) != 3:
            raise ValueError("it is not of the form 'Tag: metric name: value unit'")
        tag, metric, quantity = parts
        value, unit = quantity.split(" ")
        name = "".join(word[:1].upper() + word[1:] for word in metric.split())
        self.counter[name] += 1
        return f"{tag}.Count:{self.counter[name]}|#DJLServing:{__version__},{name}:{value} {unit}"
