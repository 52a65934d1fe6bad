"""Beam search, which vLLM's engine does not support.

Each step asks the engine for the `2 * width` most probable next tokens of each beam, and keeps the best beams. With the
engine's prefix cache, a step costs about one token for each beam. The score of a beam is the sum of the model's log
probabilities, divided by `length ** length_penalty` (as in transformers). Sampling parameters and penalties have no
effect.

The metrics count one prompt, the returned sequences, and every token that the engine generates. With vLLM's own beam
search, the metrics count tokens in the same way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from engines.errors import GenerationFailed, RequestError
from engines.interface import Engine, Generation, Sink, first_delta
from engines.request import DEADLINE, FinishReason, GenerationRequest, SamplingParameters, Token, TokenDelta
from engines.statistics import EngineStatistics
from engines.tokenization import StopStrings, ends_in_stop_string

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Beam:
    tokens: list[Token] = field(default_factory=list)
    logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None

    def extended(self, token: Token) -> _Beam:
        return _Beam([*self.tokens, token], self.logprob + (token.logprob or 0.0))

    def score(self, length_penalty: float) -> float:
        return self.logprob / float(max(len(self.tokens), 1) ** length_penalty)


_Submit = Callable[[GenerationRequest, Sink, EngineStatistics], Awaitable[Generation]]


def most_new_tokens(request: GenerationRequest, room: int) -> int:
    """Return the maximum number of tokens of a beam. `room` is the number of tokens that fit after the prompt."""
    return min(request.sampling.max_tokens or room, room)


class BeamSearchTask:
    """A beam search. It starts when it is created. When it ends, the sink gets the beams, best first."""

    def __init__(
        self, engine: Engine, request: GenerationRequest, sink: Sink, prompt_ids: Sequence[int], submit: _Submit
    ) -> None:
        assert request.beam_search is not None
        self._engine, self._request, self._options, self._sink = engine, request, request.beam_search, sink
        self._submit, self._statistics = submit, engine.statistics
        self._first_step, self._later_steps = self._statistics.of_beam_steps()
        self._prompt_ids = tuple(prompt_ids)
        self._prompt_tokens: list[Token] | None = None
        self._running, self._finished = [_Beam()], list[_Beam]()
        self._stop_ids = set(request.sampling.stop_token_ids)
        self._eos_ids: frozenset[int] = frozenset() if request.sampling.ignore_eos else engine.eos_token_ids
        # As in vLLM's sampler, these tokens are forbidden before `min_tokens`, even with `ignore_eos`.
        self._ending = engine.eos_token_ids | self._stop_ids
        self._limit = most_new_tokens(request, engine.max_model_len - len(self._prompt_ids))
        self._statistics.prompt(len(self._prompt_ids))
        self._failed = False
        self._task = asyncio.create_task(self._run())

    def when_done(self, call: Callable[[], None]) -> None:
        self._task.add_done_callback(lambda _: call())

    def cancel(self) -> None:
        if self._has_ended():
            return
        self._task.cancel()
        self._statistics.aborted_requests += self._options.width

    @property
    def begun(self) -> bool:
        return bool(self._finished) or any(beam.tokens for beam in self._running)

    def abort(self, *, at_deadline: bool = False) -> None:
        if self._has_ended():
            return
        self._task.cancel()
        reason, stop = (FinishReason.LENGTH, DEADLINE) if at_deadline else (FinishReason.ABORT, None)
        running = [dataclasses.replace(beam, finish_reason=reason, stop_reason=stop) for beam in self._running]
        missing = max(self._options.width - len(running) - len(self._finished), 0)
        nothing = [_Beam(finish_reason=reason, stop_reason=stop) for _ in range(missing)]
        if self._request.want_prompt_tokens and self._prompt_tokens is None:
            self._prompt_tokens = self._engine.detokenize(self._prompt_ids, False)
        try:
            self._emit([*self._ranked(self._finished + running), *nothing])
        except Exception:
            logger.exception("request %s: beam search failed as it was aborted", self._request.request_id)
            self._sink.on_error(GenerationFailed("internal error in beam search"))

    def _has_ended(self) -> bool:
        return self._failed or self._task.done() or bool(self._task.cancelling())

    async def _run(self) -> None:
        try:
            self._emit(await self._search())
        except RequestError as error:
            self._fail(error)
        except Exception:
            logger.exception("request %s: beam search failed", self._request.request_id)
            self._fail(GenerationFailed("internal error in beam search"))

    def _fail(self, error: RequestError) -> None:
        self._failed = True  # Set first, because the sink may cancel this generation.
        self._statistics.failed_requests += self._options.width
        self._sink.on_error(error)

    async def _search(self) -> list[_Beam]:
        width, min_tokens = self._options.width, self._request.sampling.min_tokens
        for step in range(self._limit):
            alternatives = await asyncio.gather(*(self._alternatives(beam, step) for beam in self._running))
            grown = [
                beam.extended(token)
                for beam, tokens in zip(self._running, alternatives, strict=True)
                for token in tokens
                if step >= min_tokens or token.id not in self._ending
            ]
            if not grown:
                raise GenerationFailed("no beam can go on: before min_tokens none of its probable tokens may come")
            best = sorted(grown, key=lambda beam: beam.logprob, reverse=True)[: 2 * width]
            for beam in best:
                beam.finish_reason = self._finish_reason(beam)
            self._finished += [beam for beam in best if beam.finish_reason is not None]
            self._running = [beam for beam in best if beam.finish_reason is None][:width]
            if not self._running or self._settled():
                break
        for beam in self._running:
            beam.finish_reason = FinishReason.LENGTH
        return self._ranked(self._finished + self._running)

    def _settled(self) -> bool:
        """Return True if no running beam can replace a finished beam."""
        if len(self._finished) < self._options.width:
            return False
        if self._options.early_stopping:
            return True
        penalty = self._options.length_penalty
        worst = self._ranked(self._finished)[-1].score(penalty)
        # As in transformers, the score of a running beam is calculated with its current length.
        return self._running[0].score(penalty) <= worst

    def _ranked(self, beams: list[_Beam]) -> list[_Beam]:
        penalty = self._options.length_penalty
        return sorted(beams, key=lambda beam: beam.score(penalty), reverse=True)[: self._options.width]

    async def _alternatives(self, beam: _Beam, step: int) -> tuple[Token, ...]:
        first = step == 0
        request = GenerationRequest(
            request_id=f"{self._request.request_id}-beam",
            prompt=(*self._prompt_ids, *(token.id for token in beam.tokens)),
            generated_before=len(beam.tokens),
            sampling=SamplingParameters(max_tokens=1, ignore_eos=True),
            want_tokens=True,
            want_logprobs=True,
            want_ranks=self._request.want_ranks,
            top_tokens=2 * self._options.width,
            want_prompt_tokens=first and self._request.want_prompt_tokens,
            adapter=self._request.adapter,
            trace_context=self._request.trace_context,
            cache_salt=self._request.cache_salt,
            priority=self._request.priority,
        )
        statistics = self._first_step if first else self._later_steps
        delta = await first_delta(lambda asked, sink: self._submit(asked, sink, statistics), request)
        self._statistics.tokens += delta.token_count
        if first:
            self._prompt_tokens = delta.prompt_tokens
        if not delta.tokens:
            raise GenerationFailed("the engine gave no token")
        return delta.tokens[0].top

    def _finish_reason(self, beam: _Beam) -> FinishReason | None:
        last = beam.tokens[-1].id
        if last in self._eos_ids:
            return FinishReason.EOS
        counts = len(beam.tokens) > self._request.sampling.min_tokens
        if last in self._stop_ids or (counts and self._ends_with_stop_string(beam)):
            return FinishReason.STOP
        return None

    def _ends_with_stop_string(self, beam: _Beam) -> bool:
        stop = self._request.sampling.stop
        if not stop:
            return False
        # Each token has at least one byte. So a stop string at the end of the text spans at most as many tokens as the
        # string has bytes. A character has at most 4 bytes.
        reach = 4 * max(map(len, stop)) + 1
        ids = [token.id for token in beam.tokens]
        tail = self._engine.detokenize(ids[-reach:], self._request.sampling.skip_special_tokens, ids[:-reach][-8:])
        return ends_in_stop_string(stop, "".join(token.text for token in tail[:-1]), tail[-1].text)

    def _hide_stop(self, beam: _Beam, tokens: list[Token]) -> None:
        """Remove the end token or the stop string from the texts of a beam's tokens."""
        if beam.finish_reason not in (FinishReason.EOS, FinishReason.STOP):
            return
        if tokens[-1].id in self._ending:
            tokens[-1].text = ""
        elif beam.finish_reason is FinishReason.STOP:
            _cut(tokens, self._request.sampling.stop)

    def _emit(self, beams: list[_Beam]) -> None:
        sampling = self._request.sampling
        for rank, beam in enumerate(beams):
            ids = [token.id for token in beam.tokens]
            tokens = self._engine.detokenize(ids, sampling.skip_special_tokens, self._prompt_ids)
            for shown, token in zip(tokens, beam.tokens, strict=True):
                shown.logprob, shown.rank = token.logprob, token.rank
            if not sampling.include_stop_str_in_output:
                self._hide_stop(beam, tokens)
            if beam.finish_reason is FinishReason.ABORT:
                self._statistics.aborted_requests += 1
            else:
                self._statistics.finished_requests += 1
            self._sink.on_delta(
                TokenDelta(
                    text="".join(token.text for token in tokens),
                    tokens=tokens if self._request.want_tokens else [],
                    sequence=rank,
                    finish_reason=beam.finish_reason,
                    prompt_token_count=len(self._prompt_ids),
                    token_count=len(tokens),
                    cumulative_logprob=beam.logprob,
                    prompt_tokens=self._prompt_tokens if rank == 0 else None,
                    last=rank == len(beams) - 1,
                    stop_reason=beam.stop_reason,
                )
            )


def _cut(tokens: list[Token], stop: Sequence[str]) -> None:
    """Remove the stop string from the texts of the tokens. The stop string ends in the last token."""
    strings = StopStrings(stop, include=False)
    for token in tokens[:-1]:
        strings.add(token.text, count=False)
    surplus = strings.add(tokens[-1].text, count=True) or 0
    for token in reversed(tokens):
        left = max(len(token.text) - surplus, 0)
        surplus -= len(token.text) - left
        token.text = token.text[:left]
