from __future__ import annotations

import asyncio

import pytest

from engines.errors import GenerationFailed
from engines.interface import SequenceGroup, Watchdog
from engines.request import FinishReason, Token, TokenDelta
from tests.stand_ins.recorder import Recorder


def finished(sequence: int, text: str, logprob: float, prompt_tokens: list[Token] | None = None) -> TokenDelta:
    return TokenDelta(
        text,
        sequence=sequence,
        finish_reason=FinishReason.EOS,
        cumulative_logprob=logprob,
        prompt_tokens=prompt_tokens,
        last=True,
    )


def test_candidates_come_ranked_by_probability_when_all_have_finished() -> None:
    sink = Recorder()
    group = SequenceGroup(sink, sequences=2, candidates=3, stream=False)
    group.on_delta(finished(0, "worst", -9.0, [Token(1, "p")]))
    group.on_delta(finished(2, "best", -1.0))
    assert sink.deltas == []
    group.on_delta(finished(1, "middle", -2.0))
    assert [(d.text, d.sequence, d.last) for d in sink.deltas] == [("best", 0, False), ("middle", 1, True)]
    assert sink.deltas[0].prompt_tokens == [Token(1, "p")]


def test_a_stream_of_all_sequences_passes_through_and_ends_once() -> None:
    sink = Recorder()
    group = SequenceGroup(sink, sequences=2, candidates=2, stream=True)
    group.on_delta(TokenDelta("a", sequence=0))
    group.on_delta(finished(1, "b", -1.0))
    group.on_delta(finished(0, "c", -1.0))
    assert [(d.text, d.sequence, d.last) for d in sink.deltas] == [("a", 0, False), ("b", 1, False), ("c", 0, True)]


def test_deltas_of_a_candidate_are_joined_when_only_the_best_of_a_stream_is_wanted() -> None:
    sink = Recorder()
    group = SequenceGroup(sink, sequences=1, candidates=2, stream=True)
    group.on_delta(TokenDelta("one ", [Token(1, "one ")], sequence=0))
    group.on_delta(finished(0, "two", -1.0))
    group.on_delta(finished(1, "other", -5.0))
    assert [(d.text, d.last, d.tokens) for d in sink.deltas] == [("one two", True, [Token(1, "one ")])]


def test_one_failed_sequence_fails_the_request_once() -> None:
    sink = Recorder()
    group = SequenceGroup(sink, sequences=2, candidates=2, stream=False)
    group.on_error(GenerationFailed("x"))
    group.on_error(GenerationFailed("y"))
    group.on_delta(finished(0, "late", -1.0))
    assert [error.message for error in sink.errors] == ["x"]
    assert sink.deltas == []


def test_aborted_candidates_end_the_request_with_what_they_have() -> None:
    sink = Recorder()
    group = SequenceGroup(sink, sequences=1, candidates=2, stream=True)
    group.on_delta(TokenDelta("one", sequence=0, token_count=1))
    for sequence in range(2):
        group.on_delta(TokenDelta("", sequence=sequence, finish_reason=FinishReason.ABORT, token_count=1, last=True))
    assert [(d.text, d.finish_reason, d.last) for d in sink.deltas] == [("one", FinishReason.ABORT, True)]


async def test_a_look_that_raises_is_logged_makes_the_engine_unhealthy_and_ends_no_watching(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks, enough = 0, asyncio.Event()

    async def look() -> bool:
        nonlocal looks
        looks += 1
        if looks <= 2:
            raise KeyError("a bug")
        enough.set()
        return True

    watchdog = Watchdog(look)
    watchdog.start()
    await asyncio.wait_for(enough.wait(), 60)
    watchdog.stop()
    assert watchdog.failure == "watching the engine has failed: KeyError('a bug')"
    assert [record.levelname for record in caplog.records] == ["ERROR"], "the second failure is not told again"
    assert caplog.records[0].exc_info is not None
