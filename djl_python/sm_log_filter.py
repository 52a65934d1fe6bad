"""SageMaker's telemetry log: the records that are metrics, in SageMaker's form."""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from collections.abc import Mapping

from djl_python import __version__

TELEMETRY_FILE = "SM_TELEMETRY_LOG_REV_2022_12"
"""Environment variable that names the telemetry log's file."""


class SMLogFilter(logging.Filter):
    """Lets records `Tag: metric name: value unit` through, rewritten; others are dropped."""

    sm_log_markers = ("ModelServerError", "UserScriptError", "SysHealth", "ModelServerTelemetry")

    def __init__(self) -> None:
        super().__init__()
        self.counter: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> logging.LogRecord | bool:  # type: ignore[override]
        """The rewritten record, or False. A record with a known tag that is malformed is logged as a warning."""
        message = _message(record)
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


class TelemetryHandler(logging.FileHandler):
    """Writes the records that the filter has rewritten.

    Before Python 3.12 a filter of a handler cannot replace a record, so this calls the filter itself.
    """

    def __init__(self, filename: str) -> None:
        super().__init__(filename, encoding="utf-8")
        self._telemetry = SMLogFilter()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, if it is telemetry."""
        rewritten = self._telemetry.filter(record)
        if isinstance(rewritten, logging.LogRecord):
            super().emit(rewritten)


def add_telemetry_handler(logger: logging.Logger | None = None) -> TelemetryHandler | None:
    """Sends the logger's telemetry (by default the root logger's) to the file that the environment names, if any."""
    filename = os.environ.get(TELEMETRY_FILE)
    if not filename:
        return None
    handler = TelemetryHandler(filename)
    (logger or logging.getLogger()).addHandler(handler)
    return handler


def _message(record: logging.LogRecord) -> str:
    if not isinstance(record.msg, str):
        return ""
    has_arguments = isinstance(record.args, (tuple, Mapping)) and bool(record.args)
    return record.getMessage() if has_arguments else record.msg
