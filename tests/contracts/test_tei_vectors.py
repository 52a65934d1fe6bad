"""The times in the headers of TEI's routes for vectors."""

from __future__ import annotations

import time

import numpy as np
import pytest

from engines.request import TokenDelta
from handlers.tei.answer import Vectors
from tests.contracts.pooling_exchange import ask

QUARTER = (0.1, -0.2, 0.25, 1e-7)


async def test_headers_have_the_means_of_the_times_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    answer = Vectors(2, 16)
    now = 102.0
    for prompt, (submitted_at, queued) in enumerate([(100.25, 0.125), (100.75, 0.25)]):
        numbers = np.array(QUARTER, np.float32)
        answer.feed(
            prompt, TokenDelta("", last=True, numbers=numbers, submitted_at=submitted_at, queued_seconds=queued)
        )
    headers = dict(answer.headers)
    assert [headers[f"x-{name}-time"] for name in ("total", "tokenization", "queue", "inference")] == [
        *("2000", "500", "187", "1312"),
    ]


async def test_headers_have_whole_milliseconds() -> None:
    answer = await ask("/embed", {"inputs": ["deep learning", [4, 5, 6]]})
    times = ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")
    assert [answer.headers[name].isdigit() for name in times] == [True] * 5
