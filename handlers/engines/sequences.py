"""Several sequences for one prompt, whatever the engine: n, best_of."""

from __future__ import annotations

import math

import msgspec

from handlers.engines.protocol import Sink
from handlers.errors import RequestError
from handlers.request import TokenDelta


class SequenceGroup:
    """Joins the sequences of one request into one answer.

    Where more candidates are generated than returned, or the answer is not streamed, the sequences come when all have
    finished, the most probable first (by cumulative log probability); `sequence` is then the rank. In a stream of all
    candidates the deltas pass as they come.
    """

    def __init__(self, sink: Sink, sequences: int, candidates: int, stream: bool) -> None:
        self._sink = sink
        self._sequences = sequences
        self._open = candidates
        self._pass_through = stream and sequences == candidates
        self._finished: list[TokenDelta] = []
        self._failed = False

    def on_delta(self, delta: TokenDelta) -> None:
        """Take a delta of one of the sequences."""
        if self._failed:
            return
        if delta.last:
            self._open -= 1
        if self._pass_through:
            delta.last = self._open == 0
            self._sink.on_delta(delta)
            return
        self._finished.append(delta)
        if self._open == 0:
            self._emit()

    def on_error(self, error: RequestError) -> None:
        """One sequence has failed, and with it the request."""
        if not self._failed:
            self._failed = True
            self._sink.on_error(error)

    def _emit(self) -> None:
        parts: dict[int, list[TokenDelta]] = {}
        for delta in self._finished:
            parts.setdefault(delta.sequence, []).append(delta)
        ranked = sorted(map(_join, parts.values()), key=_probability, reverse=True)[: self._sequences]
        prompt_tokens = next((d.prompt_tokens for d in self._finished if d.prompt_tokens is not None), None)
        for rank, delta in enumerate(ranked):
            delta.sequence = rank
            delta.prompt_tokens = prompt_tokens if rank == 0 else None
            delta.last = rank == len(ranked) - 1
            self._sink.on_delta(delta)


def _join(deltas: list[TokenDelta]) -> TokenDelta:
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[-1], text="".join(d.text for d in deltas), tokens=[token for d in deltas for token in d.tokens]
    )


def _probability(delta: TokenDelta) -> float:
    return delta.cumulative_logprob if delta.cumulative_logprob is not None else -math.inf
