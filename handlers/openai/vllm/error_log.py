"""Lowers the level of log records of client errors, which vLLM logs with tracebacks."""

from __future__ import annotations

import logging

from vllm.exceptions import GenerationError

from handlers.openai.vllm.errors import is_clients

# The loggers whose records are about one request.
_OF_REQUESTS = (
    *("vllm.entrypoints.openai.", "vllm.entrypoints.anthropic.", "vllm.entrypoints.serve.tokenize."),
    "vllm.entrypoints.pooling.",
    *("vllm.entrypoints.serve.exception_handling.", "vllm.renderers.", "vllm.tool_parsers.", "vllm.reasoning."),
    "vllm.entrypoints.speech_to_text.",
)
_LONGEST = 200  # The maximum number of characters of a record about a client error.


def lower_client_errors() -> None:
    """Add a filter to the root logger's handlers.

    The filter lowers the level of records about client errors. May be called several times.
    """
    for handler in logging.getLogger().handlers:
        handler.addFilter(client_error_filter)


def client_error_filter(record: logging.LogRecord) -> bool:
    """Lower the record of a client error to INFO, without its traceback.

    The record of a request whose engine has failed is also lowered, because the failure is logged once for all
    requests. Records of other server failures pass unchanged.

    Returns:
        False if the lowered record is not to be logged.
    """
    if record.levelno < logging.ERROR or not record.name.startswith(_OF_REQUESTS):
        return True
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not (is_clients(error) or isinstance(error, GenerationError)):
        return True
    text = record.getMessage()[:_LONGEST]
    # The exception's text may repeat the client's data.
    record.msg = text if error is None else f"{text} ({type(error).__name__})"
    record.args = record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return logging.getLogger().isEnabledFor(logging.INFO)
