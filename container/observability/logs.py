"""Structured logs, as JSON objects or plain lines, with the request's id. vLLM's processes log in the same format."""

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
from collections import deque
from functools import lru_cache
from typing import Any

from container.observability.standard_output import Output, Writer

FIELDS = "slipway_fields"  # The attribute of a record that holds additional fields for the JSON log.
_FLUSH_SECONDS = 1.0  # The time limit for writing the last lines when a process ends.
_OF_VLLM = "VLLM_LOGGING_CONFIG_PATH"
_PLAIN = "%(asctime)s %(levelname)-7s %(replica)s%(name)s%(request)s: %(message)s"
_ACCESS = logging.getLogger("slipway.access")
# Libraries whose lines below `warning` are not shown.
_LIBRARIES = frozenset({"vllm", "torch", "transformers", "huggingface_hub", "httpx", "uvicorn"})
# Warnings of vLLM that begin like this are not shown. Users cannot act on these warnings: either Slipway chose the
# setting, or the device has no alternative.
_WITHOUT_REMEDY = (
    "Enforce eager set, disabling torch.compile",
    "Inductor compilation was disabled by user settings",
    "Triton is not installed.",
    "Model Runner V2 requires Triton",
    "Failed to create oneDNN linear, fallback to torch linear",
    "[shutdown] Process manager: force killing remaining process",
)
_HELD_LINES, _HELD_LENGTH = 200, 4096
# A line of another process, in the format of `_PLAIN` but without the name of a replica.
_PLAIN_LINE = re.compile(r"\S+Z (?P<level>[A-Z]+) +(?P<logger>[\w.]+): (?P<message>.*)")
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
    """Formats records as text. A record about a request is one line, even if the client's data contains line ends."""

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
        """Escape line ends in a record about a request, so that parts of the request do not look like records."""
        if record.request:  # type: ignore[attr-defined]
            record.message = _CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)

    def foreign(self, stream: str, line: str) -> str:
        """Format a line that was not logged, but written directly to a stream."""
        return line

    def access(self, created: float, message: str, identity: str) -> str:
        """Return a line of the access log, as `format` would format it."""
        if not message.isprintable():
            message = _CONTROL.sub(_escaped, message)
        return f"{_timestamp(created)} INFO    {self._replica}{_ACCESS.name} [{identity}]: {message}"


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object, with the traceback as one string."""

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
        # The record's standard fields come first and cannot be overridden.
        return json.dumps(fields | getattr(record, FIELDS, {}) | fields, ensure_ascii=False, default=str)

    def foreign(self, stream: str, line: str) -> str:
        """Format a line that was not logged, but written directly to a stream. vLLM's processes already write JSON."""
        if _json_object(line) is not None:
            return line
        fields = {"time": _timestamp(time.time()), "level": "info", **self._replica, "logger": stream, "message": line}
        return json.dumps(fields, ensure_ascii=False)

    def access(self, created: float, message: str, identity: str) -> str:
        fields = {"time": _timestamp(created), "level": "info", **self._replica, "logger": _ACCESS.name}
        return json.dumps(fields | {"message": message, "request_id": identity}, ensure_ascii=False)


class HeldLines:
    """The latest lines of libraries. They are held back, and shown only if a start or an engine fails.

    Examples are vLLM's lines below `warning`. While a model is being loaded, lines that no logger wrote are also held
    back, such as progress bars.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_HELD_LINES)
        self.latest = ""  # The message of the latest line.
        self.holds_lines = True
        self.holds_output = False  # Whether lines that no logger wrote are held back as well.
        self._in_error: set[str] = set()  # The streams whose latest record is an error. Its traceback may follow.

    def take(self) -> list[str]:
        """Remove and return the lines. Only the event loop's thread calls this method; other threads may add lines."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def keep(self, line: str, message: str) -> None:
        """Keep a line. `message` is the line's text, or empty if the text says nothing about progress."""
        self._lines.append(line[:_HELD_LENGTH])
        self.latest = message.strip()[:_HELD_LENGTH] or self.latest

    def holds(self, logger: str, level: int, message: str) -> bool:
        """Return True if this record must not be shown."""
        if not self.holds_lines:
            return False
        if logger == "py.warnings":
            return self.holds_output
        if logger.partition(".")[0] not in _LIBRARIES:
            return False
        return level < logging.WARNING or (level == logging.WARNING and message.startswith(_WITHOUT_REMEDY))

    def keeps_line(self, stream: str, line: str, formatter: PlainFormatter | JsonFormatter) -> bool:
        """Keep a line of a stream and return True. If the line has to be shown, return False.

        A line that another process logged has a level and a logger, because all processes log in the same format.
        """
        name, logger, message = _parts(line)
        if logger:
            level = logging.getLevelNamesMapping().get(name, logging.WARNING)
            (self._in_error.add if level >= logging.ERROR else self._in_error.discard)(stream)
            is_held = self.holds(logger, level, message)
        else:
            is_held = self.holds_lines and self.holds_output and stream not in self._in_error
        if is_held:
            self.keep(formatter.foreign(stream, line), message)
        return is_held


def _parts(line: str) -> tuple[str, str, str]:
    """Return the level, the logger and the message of a log line. Any other line is returned as the message."""
    if found := _PLAIN_LINE.fullmatch(line):
        return found["level"], found["logger"], found["message"]
    match _json_object(line):
        case {"level": str(level), "logger": str(logger), "message": str(message)}:
            return level.upper(), logger, message
    return "", "", line


def _json_object(line: str) -> dict[str, Any] | None:
    if not (line.startswith("{") and line.endswith("}")):
        return None
    try:
        found: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found


class LogHandler(logging.Handler):
    """Passes records to a thread that formats and writes them.

    So a log call never blocks, even if the process that reads this server's output is slow.
    """

    def __init__(
        self, writer: Writer, formatter: PlainFormatter | JsonFormatter, held: HeldLines | None = None
    ) -> None:
        """Create the handler.

        Args:
            writer: Writes the lines.
            formatter: Formats the records.
            held: Keeps the lines that are not shown. None if all lines are shown.
        """
        super().__init__()
        self.setFormatter(formatter)
        self._writer, self._held = writer, held

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for the writer's thread.

        The message and the traceback are formatted here, because the arguments may change later and a traceback keeps
        the objects of its frames in memory.
        """
        try:
            record = copy.copy(record)
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
                record.exc_info = None
            if self._held is not None and self._held.holds(record.name, record.levelno, record.msg):
                self._held.keep(self.format(record), "" if record.name == "uvicorn.error" else record.msg)
                return
            self._writer.add(len(record.msg) + len(record.exc_text or ""), self.format, record)
        except Exception:
            self.handleError(record)


class AccessLog:
    """Writes a line for each request. It bypasses `logging`, which takes five times as long per line."""

    def __init__(self) -> None:
        self._writer: Writer | None = None
        self._formatter: PlainFormatter | JsonFormatter = PlainFormatter()

    def write_to(self, writer: Writer | None, formatter: PlainFormatter | JsonFormatter) -> None:
        """Set the writer. Without a writer, nothing is logged."""
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
        self.held: HeldLines | None = None  # None if all lines are shown.

    def start(self, log_format: str, replica: str, redirect: bool, quiet: bool) -> None:
        formatter = (JsonFormatter if log_format == "json" else PlainFormatter)(replica)
        held = self.held = HeldLines() if quiet else None

        def notice(dropped: int) -> str:
            text = f"{dropped} lines were dropped because the log's reader is slow"
            fields = {"name": __name__, "levelname": "WARNING", "levelno": logging.WARNING, "msg": text}
            return formatter.format(logging.makeLogRecord(fields))

        def is_held(stream: str, line: str) -> bool:
            return held is not None and held.keeps_line(stream, line, formatter)

        self.output = Output(notice, formatter.foreign if redirect else None, is_held)
        self.handler = LogHandler(self.output.log, formatter, held)
        access_log.write_to(self.output.log, formatter)


access_log = AccessLog()  # The access log of this process.
_log = _Log()


def output_handler() -> logging.Handler:
    """Return the handler that writes this process's lines.

    `configuration` names this function. vLLM applies that configuration on import, also in this process.
    """
    return _log.handler or logging.StreamHandler(sys.stdout)


def flush() -> None:
    """Write the waiting lines. Call this function before the process exits."""
    if _log.output is not None:
        _log.output.flush(_FLUSH_SECONDS)


def hold_output(hold: bool) -> None:
    """Set whether to hold back lines that no logger wrote. This has no effect if the log shows all lines."""
    if _log.held is not None:
        _log.held.holds_output = hold


def latest_held() -> str:
    """Return the message of the latest line that was held back."""
    return _log.held.latest if _log.held is not None else ""


def hold_lines() -> None:
    """Hold back lines of libraries again, as before `show_held`. Call this function when a model's start begins."""
    if _log.held is not None:
        _log.held.holds_lines = True


def show_held() -> None:
    """Write the lines that were held back. Call this function when a start or an engine has failed.

    Later lines are written immediately, until the next start.
    """
    if _log.held is None or _log.output is None:
        return
    _log.held.holds_lines = False
    lines = _log.held.take()
    if lines:
        logging.getLogger(__name__).error("the last %d lines that were not shown (--verbose shows all):", len(lines))
    for line in lines:
        _log.output.log.add(len(line), str, line)


def dropped_lines() -> int:
    """Return the number of lines that were dropped because the output was read too slowly."""
    return _log.output.dropped if _log.output is not None else 0


def configuration(log_format: str, level: str, replica: str = "") -> dict[str, Any]:
    """Return the configuration for `logging.config.dictConfig`, for this process and for vLLM's processes.

    In vLLM's processes, `output_handler` writes to the standard output that they inherit from this process.
    """
    formatter = (
        "container.observability.logs.JsonFormatter"
        if log_format == "json"
        else "container.observability.logs.PlainFormatter"
    )
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"slipway": {"()": formatter, "replica": replica}},
        "handlers": {"stdout": {"()": "container.observability.logs.output_handler", "formatter": "slipway"}},
        "root": {"handlers": ["stdout"], "level": level.upper()},
        "loggers": {"vllm": {"level": level.upper(), "propagate": True}},
    }


def configure(log_format: str, level: str, replica: str = "", *, redirect: bool = False, quiet: bool = False) -> None:
    """Set up logging in this process.

    Args:
        log_format: `plain` or `json`.
        level: The lowest level that is logged.
        replica: The name of this replica, if the server has several.
        redirect: Send everything that is written to standard output and standard error through the log, including the
            output of processes that are started later.
        quiet: Hold back lines of vLLM and other libraries (`HeldLines`).
    """
    _log.start(log_format, replica, redirect, quiet)
    logging.config.dictConfig(configuration(log_format, level, replica))
    logging.captureWarnings(True)
    atexit.register(flush)
    if _log.output is not None and _log.output.stderr is not None:
        # A process that crashes no longer reads the pipes, so the stacks go to the original standard error.
        faulthandler.enable(_log.output.stderr)


def configure_vllm(log_format: str, level: str, replica: str = "") -> None:
    """Set the log format of the processes that vLLM starts, unless VLLM_LOGGING_CONFIG_PATH is already set."""
    if _OF_VLLM in os.environ:
        return
    # The configuration is a file in memory. It exists as long as this process, so vLLM's processes can read it.
    file = os.memfd_create("slipway-logging")
    os.write(file, json.dumps(configuration(log_format, level, replica)).encode())
    os.environ[_OF_VLLM] = f"/proc/{os.getpid()}/fd/{file}"
