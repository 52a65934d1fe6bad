"""Many requests at the same time: each client gets the answer to its own request."""

from __future__ import annotations

import asyncio
import json
from random import Random

from tests.unit.handlers.custom.harness import serving

CALLS = 100


async def test_workers_that_take_one_call_at_a_time_mix_nothing_up() -> None:
    random = Random(1)
    bodies = [random.randbytes(random.randrange(5000)) for _ in range(CALLS)]
    async with serving("echo", min_workers=3, max_workers=3) as client:
        answers = await asyncio.gather(*(client.ask(body) for body in bodies))
    assert [answer.body for answer in answers] == bodies


async def test_streams_and_whole_answers_of_one_event_loop_are_not_mixed_up() -> None:
    random = Random(1)
    calls = [(f"ä{number}", random.randint(1, 30), random.random() < 0.5) for number in range(CALLS)]

    def order(text: str, count: int, stream: bool) -> str:
        return json.dumps({"do": "stream" if stream else "echo", "text": text, "count": count})

    async with serving("async_echo", async_mode=True, min_workers=2, max_workers=2) as client:
        answers = await asyncio.gather(*(client.ask(order(*call)) for call in calls))
    expected = ["".join(f"{text}-{i}\n" for i in range(count)) if stream else text for text, count, stream in calls]
    assert [answer.body.decode() for answer in answers] == expected


async def test_the_answers_of_a_dynamic_batch_go_to_those_who_asked() -> None:
    words = [f"<{number}>" for number in range(CALLS + 3)]  # The last batch is not full.
    async with serving("batch_echo", batch_size=8, max_batch_delay=0.02, min_workers=2, max_workers=2) as client:
        answers = await asyncio.gather(*(client.ask(word) for word in words))
    for word, answer in zip(words, answers, strict=True):
        assert answer.body.decode().startswith(word)
