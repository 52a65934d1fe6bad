"""Lines of the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from container.logs import PlainFormatter


def _line(message: str, **more: Any) -> str:
    return PlainFormatter().format(logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": message, **more}))


@pytest.mark.parametrize(
    ("character", "shown"),
    [("\r\n", r"\r\n"), ("\x1b[2J", r"\x1b[2J"), ("\0", r"\x00"), ("\u2028", r"\u2028"), ("\ud800", r"\ud800")],
)
def test_what_a_client_sends_cannot_look_like_a_line_of_the_log(character: str, shown: str) -> None:
    line = _line(f"refused: Model not found: a{character}2026-01-01 INFO forged", request_id="id")
    assert line.endswith(f" n [id]: refused: Model not found: a{shown}2026-01-01 INFO forged")


def test_other_letters_and_tabs_stay() -> None:
    assert _line("refused: \té 日本 😀", request_id="id").endswith("refused: \té 日本 😀")


def test_a_message_about_no_request_may_have_several_lines() -> None:
    assert _line("first\nsecond").endswith(": first\nsecond")
