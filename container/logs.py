"""Structured logs, as JSON objects or plain lines, with the request's id. vLLM's processes log in the same form."""

from __future__ import annotations

import atexit
import copy
import faulthandler
import json
import logging
import logging.config
import os
import re
import sys
import time
from functools import lru_cache
from typing import Any

from container.standard_output import Output, Writer

FLUSH_SECONDS = 1.0  # The time that a process waits at its end until its log has been read.
_OF_VLLM = "VLLM_LOGGING_CONFIG_PATH"
_PLAIN = "%(asctime)s %(levelname)-7s %(replica)s%(name)s%(request)s: %(message)s"
_ACCESS = logging.getLogger("slipway.access")
# Characters that end lines or move a terminal's cursor, and characters that cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _escaped(character: re.Match[str]) -> str:
    return character.group().encode("unicode_escape").decode("ascii")


def _timestamp(created: float) -> str:
    return f"{_second(int(created))}.{int(created % 1 * 1000):03d}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class PlainFormatter(logging.Formatter):
    """Formats records as text. A record about a request is one line, even if the client's data has line ends."""

    def __init__(self, replica: str = "") -> None:
        """Create the plain formatter.

        Args:
            replica: The name of this replica, if the server has several.
        """
        self._replica = f"{replica} " if replica else ""
        super().__init__(_PLAIN, defaults={"replica": self._replica})

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _timestamp(record.created)

    def format(self, record: logging.LogRecord) -> str:
        identity = getattr(record, "request_id", None)
        record.request = f" [{identity}]" if identity else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Escape line ends in a record about a request. Parts of the request must not look like further records."""
        if record.request:  # type: ignore[attr-defined]
            record.message = _CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)

    def foreign(self, stream: str, line: str) -> str:
        """Return a line that was written to a stream directly, not through the log."""
        return line

    def access(self, created: float, message: str, identity: str) -> str:
        """Return a line of the access log, as `format` would make it."""
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
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            fields["traceback"] = record.exc_text
        return json.dumps(fields, ensure_ascii=False)

    def foreign(self, stream: str, line: str) -> str:
        """Return a line that was written to a stream past the log. Processes of vLLM write JSON already."""
        if line.startswith("{") and line.endswith("}"):
            try:
                json.loads(line)
            except ValueError:
                pass
            else:
                return line
        fields = {"time": _timestamp(time.time()), "level": "info", **self._replica, "logger": stream, "message": line}
        return json.dumps(fields, ensure_ascii=False)

    def access(self, created: float, message: str, identity: str) -> str:
        fields = {"time": _timestamp(created), "level": "info", **self._replica, "logger": _ACCESS.name}
        return json.dumps(fields | {"message": message, "request_id": identity}, ensure_ascii=False)


class LogHandler(logging.Handler):
    """Has records formatted and written in a thread, so that no line waits for who reads it."""

    def __init__(self, writer: Writer, formatter: PlainFormatter | JsonFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for the writer's thread.

        The message and the traceback are formatted here. The arguments may change later, and a traceback would keep
        the objects of its frames alive.
        """
        try:
            record = copy.copy(record)
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
                record.exc_info = None
            self._writer.add(len(record.msg) + len(record.exc_text or ""), self.format, record)
        except Exception:
            self.handleError(record)


class AccessLog:
    """Writes a line for each request. It bypasses `logging`, which takes five times as long for a line."""

    def __init__(self) -> None:
        self._writer: Writer | None = None
        self._formatter: PlainFormatter | JsonFormatter = PlainFormatter()

    def write_to(self, writer: Writer | None, formatter: PlainFormatter | JsonFormatter) -> None:
        """Set the writer. Without a writer nothing is logged."""
        self._writer, self._formatter = writer, formatter

    def add(self, message: str, identity: str) -> None:
        """Log a request with this id."""
        if self._writer is not None and _ACCESS.isEnabledFor(logging.INFO):
            self._writer.add(len(message), self._formatter.access, time.time(), message, identity)


class _Log:
    """The log of this process."""

    def __init__(self) -> None:
        self.output: Output | None = None
        self.handler: logging.Handler | None = None

    def start(self, log_format: str, replica: str, redirect: bool) -> None:
        formatter = (JsonFormatter if log_format == "json" else PlainFormatter)(replica)

        def notice(dropped: int) -> str:
            text = f"{dropped} lines were dropped because the log's reader is slow"
            fields = {"name": __name__, "levelname": "WARNING", "levelno": logging.WARNING, "msg": text}
            return formatter.format(logging.makeLogRecord(fields))

        self.output = Output(notice, formatter.foreign if redirect else None)
        self.handler = LogHandler(self.output.log, formatter)
        access_log.write_to(self.output.log, formatter)


access_log = AccessLog()  # Of this process.
_log = _Log()


def output_handler() -> logging.Handler:
    """The writer of this process's lines. vLLM reads `configuration` when it is imported, in this process as well."""
    return _log.handler or logging.StreamHandler(sys.stdout)


def flush(seconds: float = FLUSH_SECONDS) -> None:
    """Write the waiting lines. Call this function before the process ends."""
    if _log.output is not None:
        _log.output.flush(seconds)


def dropped_lines() -> int:
    """Return the number of lines that were dropped because nobody read the log."""
    return _log.output.dropped if _log.output is not None else 0


def configuration(log_format: str, level: str, replica: str = "") -> dict[str, Any]:
    """Return the configuration for `logging.config.dictConfig`, for this process and for vLLM's processes.

    vLLM's processes write to streams that are always read.
    """
    formatter = "container.logs.JsonFormatter" if log_format == "json" else "container.logs.PlainFormatter"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"slipway": {"()": formatter, "replica": replica}},
        "handlers": {"stdout": {"()": "container.logs.output_handler", "formatter": "slipway"}},
        "root": {"handlers": ["stdout"], "level": level.upper()},
        "loggers": {"vllm": {"level": level.upper(), "propagate": True}},
    }


def configure(log_format: str, level: str, replica: str = "", *, redirect: bool = False) -> None:
    """Set up logging in this process.

    Args:
        log_format: `plain` or `json`.
        level: The lowest level that is logged.
        replica: The name of this replica, if the server has several.
        redirect: Send everything that is written to standard output and standard error through the log. This includes
            the output of processes that are started later.
    """
    _log.start(log_format, replica, redirect)
    logging.config.dictConfig(configuration(log_format, level, replica))
    logging.captureWarnings(True)
    atexit.register(flush)
    if _log.output is not None and _log.output.stderr is not None:
        # A process that crashes cannot read its own output.
        faulthandler.enable(_log.output.stderr)


def configure_vllm(log_format: str, level: str, replica: str = "") -> None:
    """Make the processes that vLLM starts log in the same form, unless vLLM's variable for it is set already."""
    if _OF_VLLM in os.environ:
        return
    # A file in memory. It exists as long as this process, so the processes that vLLM starts can read it.
    file = os.memfd_create("slipway-logging")
    os.write(file, json.dumps(configuration(log_format, level, replica)).encode())
    os.environ[_OF_VLLM] = f"/proc/{os.getpid()}/fd/{file}"
