"""What vLLM's front end logs as errors though a client caused it: kept to one line of information.

vLLM writes a traceback for many requests that it refuses, and the name of an unknown model however long it is. A client
that sends such requests in a loop would fill the log, and hide in it what an operator has to see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

_OF_REQUESTS = (
    *("vllm.entrypoints.openai.", "vllm.entrypoints.anthropic.", "vllm.entrypoints.serve.tokenize."),
    *("vllm.entrypoints.serve.exception_handling.", "vllm.renderers.", "vllm.tool_parsers.", "vllm.reasoning."),
)
"""Loggers that report on one request each."""
_LONGEST = 200


class ClientErrors(logging.Filter):
    """Lowers such records to INFO, without tracebacks; drops them where that is below the level that is logged.

    `is_clients`: whether an exception is the fault of the client. Failures of the server's own pass as they are.
    """

    def __init__(self, is_clients: Callable[[BaseException], bool]) -> None:
        super().__init__()
        self._is_clients = is_clients

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter.filter`."""
        if record.levelno < logging.ERROR or not record.name.startswith(_OF_REQUESTS):
            return True
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not self._is_clients(error):
            return True
        text = record.getMessage()[:_LONGEST]
        # The exception's text may repeat what the client sent.
        record.msg = text if error is None else f"{text} ({type(error).__name__})"
        record.args = record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return logging.getLogger().isEnabledFor(logging.INFO)


def lower_client_errors(is_clients: Callable[[BaseException], bool]) -> None:
    """Have every handler of the root logger see what clients cause as information. May be called again."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(known, ClientErrors) for known in handler.filters):
            handler.addFilter(ClientErrors(is_clients))
