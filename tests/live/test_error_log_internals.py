"""Log records that clients cause in vLLM's front end."""

from __future__ import annotations

import logging
from typing import Any

import pytest

FRONT_END = "vllm.entrypoints.openai.chat_completion.serving"


def record(name: str = FRONT_END, error: Exception | None = None, *args: Any) -> logging.LogRecord:
    info = (type(error), error, None) if error is not None else None
    return logging.LogRecord(name, logging.ERROR, "x.py", 1, "Error %s" if args else "Error", args, info)


def passed(one: logging.LogRecord) -> bool:
    from handlers.openai.vllm.error_log import client_error_filter

    return client_error_filter(one)


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_what_a_client_or_a_failed_engine_causes_is_one_short_line_of_information(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.exceptions import GenerationError

    for error in (ValueError("a secret prompt"), GenerationError("the engine has died")):
        one = record(FRONT_END, error)
        assert passed(one)
        assert (one.levelname, one.levelno) == ("INFO", logging.INFO)
        assert logging.Formatter().format(one) == f"Error ({type(error).__name__})"
    long = record(FRONT_END, None, "x" * 10_000)
    assert passed(long)
    assert len(long.getMessage()) == 200
    caplog.set_level(logging.ERROR)
    assert not passed(record(FRONT_END, ValueError("x"))), "it is dropped if only errors are logged"


@pytest.mark.parametrize(
    ("name", "error"), [(FRONT_END, RuntimeError("ours")), ("vllm.v1.engine.core", ValueError("x")), ("slipway", None)]
)
def test_failures_of_the_server_pass_as_they_are(name: str, error: Exception | None) -> None:
    one = record(name, error)
    assert passed(one)
    assert one.levelno == logging.ERROR
    assert bool(one.exc_info) is (error is not None)


def test_every_handler_of_the_root_logger_has_it_once() -> None:
    from handlers.openai.vllm.error_log import client_error_filter, lower_client_errors

    handler = logging.NullHandler()
    root = logging.getLogger()
    root.addHandler(handler)
    before = {known: list(known.filters) for known in root.handlers}
    try:
        lower_client_errors()
        lower_client_errors()
        assert handler.filters == [client_error_filter]
    finally:
        root.removeHandler(handler)
        for known, filters in before.items():
            known.filters = filters
