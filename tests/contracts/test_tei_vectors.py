"""The times in the headers of TEI's routes for vectors."""

from __future__ import annotations

import time

import numpy as np
import pytest

from engines.request import TokenDelta
from handlers.tei.answer import Vectors


def test_headers_have_the_means_of_the_texts_times_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    answer = Vectors(2, 16)
    now = 102.0
    for prompt, (submitted_at, queued) in enumerate([(100.25, 0.125), (100.75, 0.25)]):
        numbers = np.array([0.5], np.float32)
        answer.feed(
            prompt, TokenDelta("", last=True, numbers=numbers, submitted_at=submitted_at, queued_seconds=queued)
        )
    headers = dict(answer.headers)
    names = ("compute", "total", "tokenization", "queue", "inference")
    assert [headers[f"x-{name}-time"] for name in names] == ["2000", "2000", "500", "187", "1312"]
