"""Structured logs, as JSON objects or plain lines, with the request's id; the same in vLLM's processes."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.config
import os
import re
import time
from functools import lru_cache
from typing import Any

_OF_VLLM = "VLLM_LOGGING_CONFIG_PATH"
_PLAIN = "%(asctime)s %(levelname)-7s %(replica)s%(name)s%(request)s: %(message)s"
_ACCESS = logging.getLogger("slipway.access")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What ends lines, or moves a terminal's cursor; and what no encoding has."""


def _escaped(character: re.Match[str]) -> str:
    return character.group().encode("unicode_escape").decode("ascii")


def _timestamp(created: float) -> str:
    return f"{_second(int(created))}.{int(created % 1 * 1000):03d}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class PlainFormatter(logging.Formatter):
    """One line of text for each record about a request, whatever its client has sent; others may have several."""

    def __init__(self, replica: str = "") -> None:
        """`replica`: the name of this process among others that serve the same."""
        self._replica = f"{replica} " if replica else ""
        super().__init__(_PLAIN, defaults={"replica": self._replica})

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _timestamp(record.created)

    def format(self, record: logging.LogRecord) -> str:
        identity = getattr(record, "request_id", None)
        record.request = f" [{identity}]" if identity else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """What is said of a request may have parts of it, which must not look like further records."""
        if record.request:  # type: ignore[attr-defined]
            record.message = _CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)

    def access(self, created: float, message: str, identity: str) -> str:
        """A line of the access log, as `format` would make it."""
        if not message.isprintable():
            message = _CONTROL.sub(_escaped, message)
        return f"{_timestamp(created)} INFO    {self._replica}{_ACCESS.name} [{identity}]: {message}"


class JsonFormatter(logging.Formatter):
    """One JSON object for each record, with a traceback in one string."""

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._replica = {"replica": replica} if replica else {}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            **self._replica,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (identity := getattr(record, "request_id", None)) is not None:
            fields["request_id"] = identity
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)

    def access(self, created: float, message: str, identity: str) -> str:
        fields = {"time": _timestamp(created), "level": "info", **self._replica, "logger": _ACCESS.name}
        return json.dumps(fields | {"message": message, "request_id": identity}, ensure_ascii=False)


class AccessLog:
    """A line for each request, written with the others of its turn of the event loop.

    They are made past `logging`, which takes five times as long for each.
    """

    def __init__(self) -> None:
        self.handler: logging.StreamHandler[Any] | None = None
        """What writes the other lines; its formatter is one of ours. None: nothing is logged."""
        self._lines: list[str] = []

    def add(self, message: str, identity: str) -> None:
        """Log a request with this id. To be called in the event loop."""
        handler = self.handler
        if handler is None or not _ACCESS.isEnabledFor(logging.INFO):
            return
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._write, handler)
        self._lines.append(handler.formatter.access(time.time(), message, identity))  # type: ignore[union-attr]

    def _write(self, handler: logging.StreamHandler[Any]) -> None:
        lines, self._lines = self._lines, []
        handler.acquire()
        try:
            handler.stream.write("\n".join([*lines, ""]))
            handler.flush()
        finally:
            handler.release()


access_log = AccessLog()
"""Of this process."""


def configuration(log_format: str, level: str, replica: str = "") -> dict[str, Any]:
    """For `logging.config.dictConfig`, in this process and in vLLM's."""
    formatter = "container.logs.JsonFormatter" if log_format == "json" else "container.logs.PlainFormatter"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"slipway": {"()": formatter, "replica": replica}},
        "handlers": {
            "stdout": {"class": "logging.StreamHandler", "formatter": "slipway", "stream": "ext://sys.stdout"}
        },
        "root": {"handlers": ["stdout"], "level": level.upper()},
        "loggers": {"vllm": {"level": level.upper(), "propagate": True}},
    }


def configure(log_format: str, level: str, replica: str = "") -> None:
    """Set up logging in this process."""
    logging.config.dictConfig(configuration(log_format, level, replica))
    (access_log.handler,) = logging.getLogger().handlers  # type: ignore[assignment]
    logging.captureWarnings(True)


def configure_vllm(log_format: str, level: str, replica: str = "") -> None:
    """Have the processes that vLLM starts log alike, by vLLM's own variable, unless somebody else has set that."""
    if _OF_VLLM in os.environ:
        return
    # A file in memory: it goes with this process, however that ends, and stays until then for those that vLLM starts.
    file = os.memfd_create("slipway-logging")
    os.write(file, json.dumps(configuration(log_format, level, replica)).encode())
    os.environ[_OF_VLLM] = f"/proc/{os.getpid()}/fd/{file}"
