from __future__ import annotations

import logging
from typing import Any

import pytest

from djl_python import __version__
from djl_python.sm_log_filter import SMLogFilter

LATENCY = "SysHealth: LLM sharding and compilation latency: 845.62 secs"


def record(message: Any, *arguments: Any) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, "file", 1, message, arguments, None)


def filtered(telemetry: SMLogFilter, message: Any, *arguments: Any) -> str | None:
    result = telemetry.filter(record(message, *arguments))
    return result.getMessage() if isinstance(result, logging.LogRecord) else None


def test_a_tagged_record_is_rewritten_and_counted_by_its_metric() -> None:
    telemetry = SMLogFilter()
    name = f"#DJLServing:{__version__},LLMShardingAndCompilationLatency:845.62 secs"
    assert filtered(telemetry, LATENCY) == f"SysHealth.Count:1|{name}"
    assert filtered(telemetry, LATENCY) == f"SysHealth.Count:2|{name}"
    assert filtered(telemetry, "UserScriptError: %s: 1 count", "oom") == (
        f"UserScriptError.Count:1|#DJLServing:{__version__},Oom:1 count"
    )


@pytest.mark.parametrize("message", ["LLM latency: 1 secs", "SysHealthy: a: 1 s", "", {"SysHealth:": 1}])
def test_other_records_are_dropped(message: Any) -> None:
    assert filtered(SMLogFilter(), message) is None


@pytest.mark.parametrize("message", [LATENCY + " : secs", "SysHealth: latency", "SysHealth: latency: 1"])
def test_a_tagged_record_in_another_form_is_dropped_with_a_warning(
    message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert filtered(SMLogFilter(), message) is None
    assert "Forwarding" in caplog.text


def test_the_record_itself_stays_as_it_was() -> None:
    original = record(LATENCY)
    SMLogFilter().filter(original)
    assert original.getMessage() == LATENCY
