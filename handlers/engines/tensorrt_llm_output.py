"""One sequence that TensorRT-LLM generates: from its growing output to deltas.

TensorRT-LLM finds stop strings too, but shows their beginnings in a stream and takes them back later, and compares
tokens rather than text. So texts are made and stop strings are looked for here, as vLLM does both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from handlers.engines.protocol import Sink
from handlers.engines.token_text import split_text
from handlers.engines.transformers_text import StopStrings, TokenTexts
from handlers.errors import GenerationFailed, RequestError
from handlers.meter import Meter
from handlers.request import FinishReason, GenerationRequest, Token, TokenDelta

_FAILURES = {"timeout": "TensorRT-LLM gave up on it after its own time limit", "cancelled": "TensorRT-LLM cancelled it"}


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What of the model's tokenizer is asked for each token."""

    tokenizer: Any
    special_ids: frozenset[int]
    eos_token_ids: frozenset[int]


class GeneratedSequence:
    """Pushes what a sequence has become to its request's sink."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        facts: TokenizerFacts,
        sink: Sink,
        meter: Meter,
        index: int = 0,
    ) -> None:
        s = request.sampling
        self._request, self._prompt_ids, self._facts = request, prompt_ids, facts
        self._sink, self._meter, self._index = sink, meter, index
        self._texts = TokenTexts(facts.tokenizer, prompt_ids, s.skip_special_tokens, s.spaces_between_special_tokens)
        self._stop = StopStrings(s.stop, s.include_stop_str_in_output)
        self._reason: FinishReason | None = None
        self._held = ""  # text that was not sent yet
        self._pending: list[Token] = []  # tokens that were not sent yet
        self._free = 0  # characters that were sent and no token has taken yet
        self._count = 0
        self._cumulative_logprob: float | None = None
        self._prompt_tokens_due = request.want_prompt_tokens
        self._started_at = self.last_at = time.monotonic()
        self.ended = False
        """Nothing more reaches the sink."""

    def take(self, output: Any, finished: bool) -> None:
        """Push what is new in TensorRT-LLM's `CompletionOutput`; `finished`: it gives nothing more."""
        if self.ended:
            return
        new = output.token_ids[self._count :]
        if new:
            self._measure(len(new))
        for token_id in new:
            self._add(token_id, _logprobs_at(output, self._count))
            if self._reason is not None:
                break
        if finished and self._reason is None:
            self._finish(output)
        if not self.ended:
            self._push()

    def fail(self, error: RequestError) -> None:
        """End it with an error."""
        if not self.ended:
            self.ended = True
            self._meter.failed_requests += 1
            self._sink.on_error(error)

    def cancel(self) -> None:
        """End it; the sink hears nothing of it."""
        if not self.ended:
            self.ended = True
            self._meter.aborted_requests += 1

    def abort(self) -> None:
        """End it with what there is of it."""
        if not self.ended:
            self._reason = FinishReason.ABORT
            self._push()

    def _measure(self, count: int) -> None:
        now, meter = time.monotonic(), self._meter
        meter.tokens += count
        if self._count:
            meter.inter_token.observe((now - self.last_at) / count)
        else:
            meter.time_to_first_token.observe(now - self._started_at)
        self.last_at = now

    def _add(self, token_id: int, logprobs: Any) -> None:
        self._count += 1
        s = self._request.sampling
        ends_itself = self._reason = self._end_of(token_id)
        piece = "" if ends_itself and not s.include_stop_str_in_output else self._texts.add(token_id)
        logprob = _chosen(logprobs, token_id)
        if logprob is not None:
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + logprob
        if self._request.want_tokens:
            rank = _rank(logprobs, token_id) if self._request.want_ranks else None
            self._pending.append(
                Token(token_id, piece, logprob, token_id in self._facts.special_ids, self._top(logprobs), rank)
            )
        self._held += piece
        surplus = self._stop.add(piece, count=self._count > s.min_tokens)
        if surplus is not None:
            self._reason = FinishReason.STOP
            self._held = self._held[: len(self._held) - surplus]

    def _end_of(self, token_id: int) -> FinishReason | None:
        s, facts = self._request.sampling, self._facts
        ends = token_id in facts.eos_token_ids and not s.ignore_eos
        if ends and (token_id not in s.stop_token_ids or token_id == facts.tokenizer.eos_token_id):
            return FinishReason.EOS
        return FinishReason.STOP if token_id in s.stop_token_ids else None

    def _top(self, logprobs: Any) -> tuple[Token, ...]:
        count = self._request.top_tokens
        if not count or not isinstance(logprobs, dict):
            return ()
        best = sorted(logprobs.items(), key=lambda item: item[1].logprob, reverse=True)[:count]
        decode, special = self._facts.tokenizer.decode, self._facts.special_ids
        ranked = self._request.want_ranks
        return tuple(
            Token(i, decode([i]), entry.logprob, i in special, (), place if ranked else None)
            for place, (i, entry) in enumerate(best, start=1)
        )

    def _finish(self, output: Any) -> None:
        reason = output.finish_reason
        if reason == "length":
            self._reason = FinishReason.LENGTH
        elif reason == "stop":
            # Its end token was left out of the tokens; a stop token of the request is not, since it was asked for.
            self._reason = FinishReason.EOS if output.stop_reason is None else FinishReason.STOP
        else:
            self.fail(
                GenerationFailed(_FAILURES.get(reason, f"TensorRT-LLM ended it for a reason of its own: {reason}"))
            )

    def _push(self) -> None:
        finished = self._reason is not None
        if not (finished or self._request.stream):
            return
        keep = 0 if finished else self._stop.held()
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        tokens = self._release(len(text), finished)
        if not (text or tokens or finished or self._prompt_tokens_due):
            return
        delta = TokenDelta(text, tokens, self._index, self._reason, len(self._prompt_ids), self._count)
        delta.cumulative_logprob = self._cumulative_logprob
        if self._prompt_tokens_due:
            self._prompt_tokens_due = False
            delta.prompt_tokens = self._prompt_tokens()
        if finished:
            delta.last = self.ended = True
            if self._reason is FinishReason.ABORT:
                self._meter.aborted_requests += 1
            else:
                self._meter.finished_requests += 1
        self._sink.on_delta(delta)

    def _release(self, characters: int, finished: bool) -> list[Token]:
        """The tokens whose text is sent; at the end all of them, without what belongs to a stop string."""
        self._free += characters
        released = 0
        for token in self._pending:
            if len(token.text) > self._free:
                if not finished:
                    break
                token.text = token.text[: self._free]
            self._free -= len(token.text)
            released += 1
        tokens, self._pending = self._pending[:released], self._pending[released:]
        return tokens

    def _prompt_tokens(self) -> list[Token]:
        """Without log probabilities: TensorRT-LLM has none where the prompt's beginning was in its cache."""
        facts = self._facts
        return split_text(facts.tokenizer, self._prompt_ids, facts.special_ids, skip_special_tokens=False)


def _logprobs_at(output: Any, index: int) -> Any:
    """What TensorRT-LLM says of one token: its log probability, or those of several by token id, or nothing."""
    logprobs = output.logprobs
    return logprobs[index] if logprobs and index < len(logprobs) else None


def _chosen(logprobs: Any, token_id: int) -> float | None:
    if not isinstance(logprobs, dict):
        return None if logprobs is None else float(logprobs)
    entry = logprobs.get(token_id)
    return None if entry is None else float(entry.logprob)


def _rank(logprobs: Any, token_id: int) -> int | None:
    """As TensorRT-LLM says; None from its older sampler, which does not know."""
    entry = logprobs.get(token_id) if isinstance(logprobs, dict) else None
    return None if entry is None else entry.rank
