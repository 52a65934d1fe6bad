"""Reasons for refusing a JSON text."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.parsing.json_fields import json_fault

LONE = '{"inputs": "\\ud800"}'
REASON = "JSON is malformed: \\ud800 is half of a utf-16 surrogate pair (byte 12)"
CUT = "Input data was truncated"


def fault(text: bytes) -> str:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text)
    return json_fault(text, caught.value)


def test_half_a_surrogate_pair_is_not_called_a_text_that_was_cut_off() -> None:
    assert fault(LONE.encode()) == REASON


@pytest.mark.parametrize(
    "text", [b'{"a"', b'"\\ud83d', b'"\\ud83d\\', b'"\\ud83d\\ude', b'"\\\\ud83d', b'"\\ud83d\\ude00']
)
def test_a_text_that_was_cut_off_is_called_so(text: bytes) -> None:
    assert fault(text) == CUT


@given(text=st.binary())
def test_any_text_has_a_reason(text: bytes) -> None:
    assert json_fault(text, ValueError(CUT))
