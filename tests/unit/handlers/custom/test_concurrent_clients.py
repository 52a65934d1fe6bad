"""Many requests at the same time: each client gets the answer to its own request."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.handlers.custom.harness import serving

few = settings(max_examples=8)


@few
@given(st.lists(st.binary(max_size=5000), min_size=1, max_size=60), st.integers(1, 3))
def test_workers_that_take_one_call_at_a_time_mix_nothing_up(bodies: list[bytes], workers: int) -> None:
    async def run() -> list[bytes]:
        async with serving("echo", min_workers=workers, max_workers=workers) as client:
            answers = await asyncio.gather(*(client.ask(body) for body in bodies))
        return [answer.body for answer in answers]

    assert asyncio.run(run()) == bodies


@few
@given(st.lists(st.tuples(st.text(max_size=20), st.integers(1, 30), st.booleans()), min_size=1, max_size=60))
def test_streams_and_whole_answers_of_one_event_loop_are_not_mixed_up(calls: list[tuple[str, int, bool]]) -> None:
    def order(text: str, count: int, stream: bool) -> str:
        return json.dumps({"do": "stream" if stream else "echo", "text": text, "count": count})

    async def run() -> list[str]:
        async with serving("async_echo", async_mode=True, min_workers=2, max_workers=2) as client:
            answers = await asyncio.gather(*(client.ask(order(*call)) for call in calls))
        return [answer.body.decode() for answer in answers]

    expected = ["".join(f"{text}-{i}\n" for i in range(count)) if stream else text for text, count, stream in calls]
    assert asyncio.run(run()) == expected


@few
@given(st.lists(st.text(max_size=20), min_size=1, max_size=40), st.integers(2, 8))
def test_the_answers_of_a_dynamic_batch_go_to_those_who_asked(texts: list[str], batch_size: int) -> None:
    words = [f"<{index} {text}>" for index, text in enumerate(texts)]

    async def run() -> list[str]:
        async with serving("batch_echo", batch_size=batch_size, max_batch_delay=0.02) as client:
            answers = await asyncio.gather(*(client.ask(word) for word in words))
        return [answer.body.decode() for answer in answers]

    for word, answer in zip(words, asyncio.run(run()), strict=True):
        assert answer.startswith(word)
