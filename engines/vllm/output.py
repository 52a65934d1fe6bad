"""Passes the outputs of vLLM's engine to Slipway's sinks.

vLLM's `OutputProcessor` keeps a `RequestState` for each sequence. For each engine step, it calls in this order:
`detokenizer.update`, `logprobs_processor.update_from_output`, `make_request_output`. Slipway registers its own state,
`PushedState`, which passes the step's tokens directly to the request's sink. So a token needs no queue, no task switch
and no `RequestOutput`, and log probabilities are read from the raw arrays. vLLM still handles stop strings,
detokenizing and aborts.

A common token of an answer without stop strings skips these calls. `LeanOutputProcessor` passes it to
`PushedState.take`, which does the same work in one call. If an answer is not streamed, has no stop strings and shows no
tokens, its text is made only when the answer ends.

In each row of `EngineCoreOutput.new_logprobs` and `new_prompt_logprobs_tensors`, the log probability of the chosen
token comes first, and those of the most probable tokens follow. A separate array has the rank of the chosen token. The
most probable token has rank 1.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.exceptions import GenerationError, RetryableRequestError, VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.detokenizer import (
    FastIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
    uses_fast_detokenizer,
)
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from engines.errors import EngineDead, EngineFault, GenerationFailed, InvalidRequest, Overloaded, RequestError
from engines.interface import Sink
from engines.loaded_model import ModelTexts
from engines.request import DEADLINE, FinishReason, GenerationRequest, Token, TokenDelta
from engines.statistics import EngineStatistics
from engines.tokenization import HeldTokens, prompt_tokens
from engines.vllm.async_llm import seconds_in_engine, seconds_in_queue
from engines.vllm.constraints.translator import no_token_left
from engines.vllm.output_processor import TokenTaker

logger = logging.getLogger(__name__)


class _Recording:
    """A detokenizer that records the text of each token of a step."""

    pieces: list[str]

    def decode_next(self, next_token_id: int) -> str:
        piece: str = super().decode_next(next_token_id)  # type: ignore[misc]
        self.pieces.append(piece)
        return piece


class _RecordingFast(_Recording, FastIncrementalDetokenizer):
    """The detokenizer for tokenizers of the library `tokenizers`."""


class _RecordingSlow(_Recording, SlowIncrementalDetokenizer):
    """The detokenizer for all other tokenizers."""


class TokensApart:
    """The texts of single tokens, as vLLM shows them with log probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        # Returns the text of a token that follows other tokens. Alone, a token that ends a character has no text.
        self._correct = LogprobsProcessor(tokenizer, None, None, None, None, None)._correct_decoded_token

    def text(self, token_id: int, before: Sequence[int]) -> str:
        """Return the text of a token that follows `before`. If it ends a character, its text is the whole character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = convert_ids_list_to_tokens(self._tokenizer, [token_id])[0]
        if not text.endswith("\ufffd"):
            return text
        corrected: str = self._correct(token_id, list(before[-_CHARACTER_TOKENS:]))
        return corrected


_CHARACTER_TOKENS = 4  # To find the character that ends with a token, vLLM needs this many earlier tokens.
_END_OF_PROMPT = 16  # The number of tokens at a prompt's end that show whether it ends within a character.
_BLOCK = 1024  # The number of tokens that are decoded together if a text ends in a row of U+FFFD.


class _StepLogprobs:
    """The `logprobs_processor` of a state. It keeps the raw arrays of a step."""

    step: Any = None
    prompt: tuple[Any, ...] = ()

    def update_from_output(self, output: EngineCoreOutput) -> None:
        self.step = output.new_logprobs
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt += (output.new_prompt_logprobs_tensors,)


class _NoQueue:
    """Replaces the `queue` of a sequence when the sequence has ended. Drops everything that vLLM puts there."""

    def put(self, output: Any) -> None: ...


_ENDED = _NoQueue()


class Siblings(ParentRequest):
    """The sequences of one request. vLLM's statistics count the request when its last sequence ends."""

    def __init__(self, sequences: int) -> None:
        self.request_id = ""  # vLLM looks the id up among its own parents, and finds nothing.
        self.sequences = sequences
        self.child_requests = set(range(sequences))  # Sequences that have not ended.
        self.max_num_generation_tokens = 0

    @property
    def n(self) -> int:
        return self.sequences


def _own_error(error: Exception) -> RequestError:
    """Return Slipway's error for an error from vLLM. vLLM 0.33 also raises errors for single requests."""
    match error:
        case VLLMClientError():  # For example, a grammar cannot be compiled.
            return InvalidRequest(str(error))
        case RetryableRequestError():  # The engine is paused.
            return Overloaded(str(error))
        case GenerationError():
            return GenerationFailed(str(error))
    return EngineDead()


class OwnState(TokenTaker):
    """A sequence or a pooled prompt of Slipway. vLLM's output processor keeps this state until the sequence ends."""

    takes_tokens = False
    token_count = 0  # The number of tokens so far.

    def __init__(self, request: EngineCoreRequest, sink: Sink, statistics: EngineStatistics, **others: Any) -> None:
        """Create the state. `others` are the other arguments of `RequestState`."""
        super().__init__(
            request_id=request.request_id,
            external_req_id=request.external_req_id or "",
            lora_request=request.lora_request,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            prompt_embeds=None,
            arrival_time=request.arrival_time,
            queue=None,
            log_stats=True,
            stream_interval=1,
            **others,
        )
        self.queue: OwnState | _NoQueue = self
        self.sink, self.statistics = sink, statistics
        # After the engine's death, this request is sent again. Media take too much memory.
        self.core_request = None if request.mm_features else request
        self.submitted_at, self.ended = time.monotonic(), False

    @property
    def last_at(self) -> float:
        """The time of the last token, or of the submission if there is no token."""
        assert self.stats is not None
        last_token_at: float = self.stats.last_token_ts
        return max(last_token_at, self.submitted_at)

    def put(self, output: Any) -> None:
        """Receive an object that vLLM puts into the state's `queue`.

        vLLM puts only errors there, because `make_request_output` returns no output.
        """
        if isinstance(output, Exception):
            self.fail(_own_error(output))

    def cancel(self) -> None:
        """End the sequence, because its client has left."""
        if not self.ended:
            self.end()
            self.statistics.aborted_requests += 1

    def abort(self, *, at_deadline: bool = False) -> None:
        """End the sequence. The client gets the answer so far, or an error if there is no answer."""

    def fail(self, error: RequestError) -> None:
        if self.ended:
            return
        self.end()
        self.statistics.failed_requests += 1
        try:
            self.sink.on_error(error)
        except Exception:  # The other requests must still get their errors.
            logger.exception("request %s: internal error while handling an error", self.external_req_id)

    def fail_internally(self, part: str) -> None:
        """Log the current exception, and fail. `part` names the part of the answer that caused the exception."""
        logger.exception("request %s: internal error while handling %s", self.external_req_id, part)
        self.ended = False  # If the last delta failed, this was already True.
        self.fail(GenerationFailed(f"internal error while handling {part}"))

    def end(self) -> None:
        self.ended = True
        self.queue = _ENDED  # This breaks a reference cycle, so the state is freed at once.
        if self.parent_req is not None:
            self.parent_req.child_requests.discard(self.request_index)


class PooledState(OwnState):
    """One pooled prompt. Its result (`TokenDelta.numbers`) is a vector or scores, or a row of them for each token."""

    def __init__(self, request: EngineCoreRequest, sink: Sink, statistics: EngineStatistics) -> None:
        super().__init__(
            request,
            sink,
            statistics,
            parent_req=None,
            request_index=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logprobs_processor=None,
            detokenizer=None,
            max_tokens_param=None,
        )

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        *_: Any,
        **__: Any,
    ) -> None:
        """Push the result to the sink. vLLM calls this method when the result is ready."""
        if self.ended or finish_reason is None:
            return
        if finish_reason in (VllmFinishReason.ABORT, VllmFinishReason.ERROR):
            self.fail(GenerationFailed("the request was aborted"))
            return
        self.end()
        # An exception here would end vLLM's output loop, and with the loop all other requests.
        try:
            numbers = pooling_output.array()
            queued = seconds_in_queue(self)
            self.statistics.pooled(time.monotonic() - self.submitted_at, queued)
            self.sink.on_delta(
                TokenDelta(
                    "",
                    prompt_token_count=self.prompt_len,
                    last=True,
                    numbers=numbers,
                    submitted_at=self.submitted_at,
                    queued_seconds=queued,
                )
            )
        except Exception:
            self.fail_internally("the numbers")

    def abort(self, *, at_deadline: bool = False) -> None:
        self.fail(GenerationFailed("the request was aborted"))


class PushedState(OwnState):
    """One sequence of one request."""

    def __init__(
        self,
        request: EngineCoreRequest,
        generation: GenerationRequest,
        sequence: int,
        sink: Sink,
        statistics: EngineStatistics,
        texts: ModelTexts,
        apart: TokensApart,
        *,
        siblings: Siblings | None = None,
        interval: int = 1,
        check_answer: Callable[[str], None] | None = None,
    ) -> None:
        """Create the pushed state.

        Args:
            siblings: The sequences of the request, if there are several.
            interval: The number of tokens in each part of a stream. The first part is sent with the first token.
            check_answer: Receives the text when the sequence has ended.
        """
        self.want_tokens = generation.want_tokens
        # The number of tokens at which the next part is sent. A last part is sent at the end.
        self.due, self.interval = (1, interval) if generation.stream else (sys.maxsize, 0)
        self.tokenizer = texts.tokenizer
        self.logprobs = _StepLogprobs()
        self.apart = apart if generation.tokens_apart else None
        params = request.sampling_params
        assert params is not None
        # Whether the text is made only at the end, from all tokens.
        self.whole = (
            not (generation.stream or self.want_tokens or params.stop)
            and texts.joins_bytes
            and uses_fast_detokenizer(texts.tokenizer)
            and (params.skip_special_tokens or params.spaces_between_special_tokens)
            and not request.mm_features  # `_whole_text` needs `core_request`.
        )
        if self.whole:
            detokenizer: Any = IncrementalDetokenizer()
        elif self.want_tokens and self.apart is None:
            recording = _RecordingFast if uses_fast_detokenizer(texts.tokenizer) else _RecordingSlow
            detokenizer = recording(texts.tokenizer, request)
            detokenizer.pieces = []
        else:
            detokenizer = IncrementalDetokenizer.from_new_request(texts.tokenizer, request)
        super().__init__(
            request,
            sink,
            statistics,
            parent_req=siblings,
            request_index=sequence,
            output_kind=RequestOutputKind.DELTA,
            logprobs_processor=self.logprobs,
            detokenizer=detokenizer,
            max_tokens_param=generation.sampling.max_tokens,
            top_p=generation.sampling.top_p,
            n=generation.sequences,
            temperature=generation.sampling.temperature,
        )
        self.sequence = sequence
        self.check_answer = check_answer
        self.top_tokens, self.special_ids = generation.top_tokens, texts.special_ids
        self.want_ranks = generation.want_ranks
        self.own_stop_ids = generation.sampling.stop_token_ids
        self.dead_end = no_token_left(generation.sampling) if generation.sampling.constraint is not None else None
        self.tokens: list[Token] = []  # Tokens that the sink has not received yet.
        may_clip = bool(generation.sampling.stop) and self.want_tokens and self.apart is None
        self.held = HeldTokens() if may_clip else None
        self.token_count = 0
        self.prompt_tokens_due = generation.want_prompt_tokens
        self.cumulative_logprob: float | None = None
        # Whether the engine's outputs have only tokens and their log probabilities.
        plain = not (self.top_tokens or self.want_ranks or self.prompt_tokens_due or params.stop)
        self.takes_tokens = plain and (self.whole or isinstance(detokenizer, FastIncrementalDetokenizer))

    def take(self, token_id: int, logprob: float | None) -> None:
        if self.ended:
            return
        try:
            self.token_count += 1
            detokenizer = self.detokenizer
            detokenizer.token_ids.append(token_id)
            if logprob is not None:
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprob
            if self.whole:
                return
            # `_Recording.decode_next` is not needed, because the piece is used at once.
            piece = FastIncrementalDetokenizer.decode_next(detokenizer, token_id)
            detokenizer.output_text += piece
            if self.want_tokens:
                if self.apart is None:
                    self.tokens.append(Token(token_id, piece, logprob, token_id in self.special_ids))
                else:
                    before = detokenizer.token_ids[-1 - _CHARACTER_TOKENS : -1]
                    self.tokens.append(Token(token_id, self.apart.text(token_id, before), logprob))
            if self.token_count < self.due:
                return
            text, tokens = detokenizer.get_next_output_text(False, True), self.tokens
            # With `tokens_apart`, a part is sent for each token, even for a token within a character.
            if text or tokens or self.apart is not None:
                self.tokens = []
                count = self.token_count
                self.due = count + self.interval
                self.sink.on_delta(
                    TokenDelta(text, tokens, self.sequence, None, self.prompt_len, count, self.cumulative_logprob)
                )
        except Exception:  # The error would end vLLM's output loop, and with the loop all other requests.
            self.fail_internally("a token")

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: int | str | None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Push a step to the sink. vLLM calls this method for each step.

        The result is None, so vLLM queues nothing.
        """
        if self.ended:
            return
        # An exception here would end vLLM's output loop, and with the loop all other requests.
        try:
            if new_token_ids:
                self.token_count += len(new_token_ids)
                logprobs = self._logprobs(len(new_token_ids)) if self.logprobs.step is not None else None
                if self.want_tokens:
                    (self._collect if self.apart is None else self._collect_apart)(new_token_ids, logprobs)
            if finish_reason is not None or self.token_count >= self.due:
                self._push(finish_reason, stop_reason)
        except Exception:
            self.fail_internally("a token")

    def abort(self, *, at_deadline: bool = False) -> None:
        """End the sequence with its text so far, as vLLM's abort does."""
        if at_deadline:
            self.make_request_output([], None, VllmFinishReason.LENGTH, DEADLINE)
        else:
            self.make_request_output([], None, VllmFinishReason.ABORT, None)

    def _logprobs(self, count: int) -> list[float]:
        # The sampler puts the chosen token first in each row.
        values: list[float] = self.logprobs.step.logprobs[:count, 0].tolist()
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(values)
        return values

    def _collect(self, token_ids: list[int], logprobs: list[float] | None) -> None:
        pieces, special = self.detokenizer.pieces, self.special_ids
        for i, token_id in enumerate(token_ids):
            # The token that ended the sequence is not detokenized, so it has no piece.
            piece = pieces[i] if i < len(pieces) else ""
            top = self._top(i) if self.top_tokens else ()
            logprob = logprobs[i] if logprobs is not None else None
            rank = self.logprobs.step.sampled_token_ranks[i].item() if self.want_ranks else None
            self.tokens.append(Token(token_id, piece, logprob, token_id in special, top, rank))
        pieces.clear()

    def _collect_apart(self, token_ids: list[int], logprobs: list[float] | None) -> None:
        apart, step = self.apart, self.logprobs.step
        assert apart is not None
        assert logprobs is not None
        generated = self.detokenizer.output_token_ids
        for i, token_id in enumerate(token_ids):
            place = max(self.token_count - len(token_ids) + i, 0)
            before = generated[max(place - _CHARACTER_TOKENS, 0) : place]
            top: tuple[Token, ...] = ()
            if self.top_tokens:
                ids = step.logprob_token_ids[i, 1 : 1 + self.top_tokens].tolist()
                values = step.logprobs[i, 1 : 1 + self.top_tokens].tolist()
                top = tuple([Token(t, apart.text(t, before), v) for t, v in zip(ids, values, strict=True)])
            rank = step.sampled_token_ranks[i].item() if self.want_ranks else None
            self.tokens.append(Token(token_id, apart.text(token_id, before), logprobs[i], False, top, rank))

    def _top(self, row: int) -> tuple[Token, ...]:
        raw = self.logprobs.step
        ids = raw.logprob_token_ids[row, 1 : 1 + self.top_tokens].tolist()
        values = raw.logprobs[row, 1 : 1 + self.top_tokens].tolist()
        return tuple(
            Token(i, self.tokenizer.decode([i]), v, i in self.special_ids, (), place if self.want_ranks else None)
            for place, (i, v) in enumerate(zip(ids, values, strict=True), start=1)
        )

    def _push(self, finish_reason: Any, stop_reason: int | str | None) -> None:
        finished = finish_reason is not None
        detokenizer = self.detokenizer
        text = self._whole_text(finish_reason) if self.whole else detokenizer.get_next_output_text(finished, True)
        tokens, self.tokens = self.tokens, []
        if self.held is not None:
            for token in tokens:
                self.held.add(token)
            tokens = self.held.release(len(text), finished)
        if not (text or tokens or finished or self.prompt_tokens_due or self.apart is not None):
            return
        count = self.token_count
        self.due = count + self.interval
        delta = TokenDelta(text, tokens, self.sequence, None, self.prompt_len, count, self.cumulative_logprob)
        if self.prompt_tokens_due:
            self.prompt_tokens_due = False
            delta.prompt_tokens = self._prompt_tokens()
        if finished:
            if finish_reason == VllmFinishReason.ERROR:
                self.fail(self.dead_end or EngineFault())
                return
            self.end()
            delta.finish_reason = self._finish_reason(finish_reason, stop_reason)
            delta.last, delta.stop_reason = True, stop_reason
            delta.submitted_at, delta.queued_seconds = self.submitted_at, seconds_in_queue(self)
            if delta.finish_reason is FinishReason.ABORT:
                self.statistics.aborted_requests += 1
            else:
                self.statistics.finished_requests += 1
                self.statistics.ended(count, seconds_in_engine(self))
        self.sink.on_delta(delta)
        if finished and self.check_answer is not None:
            self.check_answer(text if self.whole else detokenizer.output_text)

    def _whole_text(self, finish_reason: Any) -> str:
        """Return the text of all tokens. vLLM's detokenizer makes the same text from single tokens.

        If the prompt ends with a whole character, the tokens' bytes are joined and decoded, without an incomplete
        character at the end.
        """
        request, ids = self.core_request, self.detokenizer.token_ids
        params: Any = request and request.sampling_params
        prompt = self.prompt_token_ids or []
        if finish_reason == VllmFinishReason.STOP and not params.include_stop_str_in_output:
            ids = ids[:-1]
        decode = partial(self.tokenizer.backend_tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        before, begun = decode(prompt[-_END_OF_PROMPT:]), ""
        if before.endswith("\ufffd") or (not before and len(prompt) > _END_OF_PROMPT):
            # The prompt may end within a character. vLLM's detokenizer finds the token that completes the character.
            rest = iter(ids)
            begun = next(filter(None, map(FastIncrementalDetokenizer(self.tokenizer, request).decode_next, rest)), "")
            ids = list(rest)
        text: str = decode(ids)
        return begun + (_without_incomplete_end(decode, ids) if text.endswith("\ufffd") else text)

    def _finish_reason(self, reason: Any, stop_reason: int | str | None) -> FinishReason:
        if reason == VllmFinishReason.LENGTH:
            return FinishReason.LENGTH
        if reason == VllmFinishReason.ABORT:
            return FinishReason.ABORT
        # The model may have several end tokens. vLLM reports all except one as stop tokens.
        if stop_reason is None or (isinstance(stop_reason, int) and stop_reason not in self.own_stop_ids):
            return FinishReason.EOS
        return FinishReason.STOP

    def _prompt_tokens(self) -> list[Token]:
        chunks = self.logprobs.prompt
        values = [value for chunk in chunks for value in chunk.logprobs[:, 0].tolist()]
        ranks = [rank for chunk in chunks for rank in chunk.selected_token_ranks.tolist()] if self.want_ranks else []
        return prompt_tokens(self.tokenizer, self.prompt_token_ids or (), self.special_ids, values, ranks)


def _without_incomplete_end(decode: Callable[[list[int]], str], ids: list[int]) -> str:
    """Return the text of tokens without an incomplete character at the end, as in a stream.

    A stream treats one or more U+FFFD at the end as the beginning of a character.
    """
    silent = {token_id for token_id in set(ids) if not decode([token_id])}
    ids = [token_id for token_id in ids if token_id not in silent]
    # A character has at most four bytes, and each of these tokens has at least one. So the last `seen` tokens show
    # whether a text ends within a character.
    seen = 2 * _CHARACTER_TOKENS
    end = len(ids)
    while end > _BLOCK and not decode(ids[end - _BLOCK : end]).strip("\ufffd"):
        end -= _BLOCK - seen
    while decode(ids[max(end - seen, 0) : end]).endswith("\ufffd"):
        end -= 1
    return decode(ids[:end])
