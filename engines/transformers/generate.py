"""Runs one batch of requests with transformers' `model.generate`, in the engine's thread.

`generate` manages padding, the KV cache, the steps and the beams. Without beams, the batch's `Sampler` chooses the
tokens of each step, and each sequence ends by its own rules (`BatchSequence`). `generate` calls the sampler through a
logits processor. A stopping criterion tells `generate` which sequences have ended. Each sequence keeps its generated
tokens, so a batch that fails continues from these tokens. If memory ran out, the batch continues in halves. After any
other error, each sequence continues alone.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from engines.errors import GenerationFailed, RequestError
from engines.interface import Sink
from engines.memory.garbage_collection import release_memory
from engines.request import DEADLINE, FinishReason, GenerationRequest, Token, TokenDelta
from engines.start_failure import failure_of
from engines.tokenization import HeldTokens, StopStrings, TokenTexts, ends_in_stop_string, prompt_tokens
from engines.transformers.model import TransformersModel
from engines.transformers.sampling import Choice, Sampler

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence, or all beams of a search. While its batch runs, only the engine's thread changes it."""

    job: Job
    sequence: BatchSequence
    generator: torch.Generator  # The source of the sequence's random numbers.
    finished: bool = False  # Whether the sequence has failed, or the search has ended.
    last_at: float = 0.0  # The time of the last token. An exception: only the event loop uses it.

    @property
    def done(self) -> bool:
        return self.finished or self.sequence.finish_reason is not None or self.job.ended


@dataclass(slots=True, eq=False)
class Job:
    """A request with all its sequences.

    Only the event loop changes a job, apart from `rows` and `searched`, which the engine's thread changes, too.
    """

    request: GenerationRequest
    prompt_ids: list[int]
    sink: Sink
    open_sequences: int  # The number of sequences, or beams, that have not finished.
    arrived_at: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    ended: bool = False  # If True, nothing more reaches the sink. The engine's thread reads this before each step.
    # Whether the request must end early and keep the text that it has so far. The engine's thread reads this before
    # each step.
    aborted: bool = False
    at_deadline: bool = False  # Whether the request was aborted at the deadline of its call.
    searched: bool = False  # Whether the beams have their first token. The engine's thread sets this.


# Receives the result of a step: its time, the sequences that got a token, and the deltas.
Post = Callable[[float, Sequence[Row], Sequence[tuple[Job, TokenDelta | RequestError]]], None]


@dataclass(slots=True, eq=False)
class Batch:
    """Jobs that run together. All have the same parameters."""

    jobs: list[Job]
    began_at: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)  # The time of the last step, or of the start.


class BatchRunner:
    """Runs batches on one model. `post` passes the result of each step to the event loop."""

    def __init__(self, model: TransformersModel, post: Post) -> None:
        self._model, self._post = model, post
        # Whether prompts of different lengths can run together. A model without a mask would treat padding as text.
        self.pads = "attention_mask" in inspect.signature(model.model.forward).parameters
        # All parameters come from the request. Otherwise transformers would add parameters from the model's own
        # configuration.
        model.model.generation_config = GenerationConfig(pad_token_id=model.pad_token_id)

    def try_out(self) -> None:
        self._model.model.generate(
            **padded([[self._model.pad_token_id]], self._model),
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=1),
        )

    def run(self, batch: Batch) -> None:
        """Run a batch to its end. Each job ends with its last delta or with an error.

        Raises:
            RuntimeError: The device no longer computes.
        """
        self._attempt(batch, [row for job in batch.jobs for row in job.rows])

    def _attempt(self, batch: Batch, rows: Sequence[Row]) -> None:
        """Run `rows` together. If that fails, run them in parts, so that only the rows that cause the error get it."""
        rows = [row for row in rows if not row.done]
        if not rows:
            return
        try:
            if rows[0].job.request.beam_search is None:
                self._generate(batch, rows)
            else:
                self._search(batch, rows)
            return
        except Exception as caught:
            no_memory = failure_of(caught).out_of_memory
            if not no_memory:
                logger.exception("a batch of %d has failed", len(rows))
        # The exception has been freed here, together with the tensors that its traceback referenced.
        release_memory()
        torch.ones(2, device=self._model.device).sum().item()  # Raises if the device no longer computes.
        if len(rows) == 1:
            no_room = "the request needs more memory than there is, even alone"
            self._fail(rows[0], no_room if no_memory else "internal error while generating")
            return
        logger.warning("a batch of %d did not fit or failed; trying it in parts", len(rows))
        middle = len(rows) // 2
        for part in [rows[:middle], rows[middle:]] if no_memory else [[row] for row in rows]:
            batch.moved_at = time.monotonic()
            self._attempt(batch, part)

    def _fail(self, row: Row, reason: str) -> None:
        for sibling in row.job.rows:
            sibling.finished = True
        self._post(time.monotonic(), (), [(row.job, GenerationFailed(reason))])

    def _generate(self, batch: Batch, rows: list[Row]) -> None:
        for row in rows:
            if row.job.request.want_prompt_tokens and row.sequence.prompt_logprobs is None:
                known = row.job.rows[0].sequence.prompt_logprobs
                row.sequence.prompt_logprobs = known or read_prompt(self._model, row.job.prompt_ids)
                batch.moved_at = time.monotonic()
        # `generate` also appends padding to rows that have finished, and no row may exceed the model's context. So a
        # call ends when its longest row fills the context, and the unfinished rows continue in another call.
        while rows:
            self._generate_within(batch, rows)
            rows = [row for row in rows if not row.done]

    def _generate_within(self, batch: Batch, rows: list[Row]) -> None:
        """Generate until all rows have ended, or until the longest row fills the context."""
        texts = [row.job.prompt_ids + row.sequence.token_ids for row in rows]
        room = self._model.max_model_len - max(map(len, texts))
        wanted = max(row.sequence.limit - len(row.sequence.token_ids) for row in rows)
        steps = _Steps(batch, rows, self._model, self._post)
        self._model.model.generate(
            **padded(texts, self._model),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=min(wanted, room), pad_token_id=self._model.pad_token_id
            ),
            logits_processor=LogitsProcessorList([steps.choose]),
            stopping_criteria=StoppingCriteriaList([steps.stopped]),
        )
        for row in rows:
            ended = row.sequence.limit <= len(row.sequence.token_ids) or not steps.count
            if ended and not row.done:
                self._fail(row, "generation ended before the sequence did")

    def _search(self, batch: Batch, rows: list[Row]) -> None:
        """Run a beam search. Jobs with different limits run separately, because `generate` has one limit for all."""
        for limit in sorted({row.sequence.limit for row in rows}):
            some = [row for row in rows if row.sequence.limit == limit and not row.done]
            if some:
                self._search_within(batch, some, limit)

    def _search_within(self, batch: Batch, rows: list[Row], limit: int) -> None:
        jobs = [row.job for row in rows]
        model, sampling, options = self._model, jobs[0].request.sampling, jobs[0].request.beam_search
        assert options is not None
        inputs = padded([job.prompt_ids for job in jobs], model)
        start = inputs["input_ids"].shape[1]
        reach = 4 * max(map(len, sampling.stop), default=0) + 1  # A character takes at most four tokens.
        decode = partial(model.tokenizer.batch_decode, skip_special_tokens=sampling.skip_special_tokens)

        def stopped(input_ids: Any, scores: Any, **_: Any) -> Any:
            """Return which candidates for beams have ended or were cancelled. Each job has the same number of them."""
            batch.moved_at = time.monotonic()
            each = len(input_ids) // len(jobs)
            for job in jobs:
                job.searched = True
            ended = [job.ended or job.aborted for job in jobs for _ in range(each)]
            if sampling.stop and input_ids.shape[1] - start > sampling.min_tokens:
                tails = input_ids[:, max(start, input_ids.shape[1] - reach) :].tolist()
                found = []
                for before, text in zip(decode([tail[:-1] for tail in tails]), decode(tails), strict=True):
                    known = before.rstrip("\ufffd")  # U+FFFD stands for an incomplete character.
                    found.append(ends_in_stop_string(sampling.stop, known, text[len(known) :]))
                ended = [gone or here for gone, here in zip(ended, found, strict=True)]
            return torch.tensor(ended, device=input_ids.device)

        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
        found = model.model.generate(
            **inputs,
            generation_config=GenerationConfig(
                do_sample=False,
                num_beams=options.width,
                num_return_sequences=options.width,
                length_penalty=options.length_penalty,
                early_stopping=options.early_stopping,
                max_new_tokens=limit,
                min_new_tokens=min(sampling.min_tokens, limit) or None,
                pad_token_id=model.pad_token_id,
                eos_token_id=sorted(ends) or None,
                return_dict_in_generate=True,
            ),
            stopping_criteria=StoppingCriteriaList([stopped]),
        )
        # The lengths come from `beam_indices`, because the padding after a beam's tokens can have the same ids as real
        # tokens.
        lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
        beams = [ids[:length] for ids, length in zip(found.sequences[:, start:].tolist(), lengths, strict=True)]
        outcomes = []
        for place, row in enumerate(rows):
            own = beams[place * options.width : (place + 1) * options.width]
            outcomes += [(row.job, delta) for delta in beam_deltas(row.job, own, model)]
            row.finished = True
        self._post(time.monotonic(), (), outcomes)


class _Steps:
    """The logits processor (`choose`) and the stopping criterion (`stopped`) for one call of `generate`."""

    def __init__(self, batch: Batch, rows: list[Row], model: TransformersModel, post: Post) -> None:
        self._batch, self._rows, self._model, self._post = batch, rows, model, post
        self._sampler = Sampler(
            rows[0].job.request,
            model,
            [row.job.prompt_ids for row in rows],
            [row.sequence.token_ids for row in rows],
            [row.generator for row in rows],
        )
        self.count = 0  # The number of steps so far.

    def choose(self, input_ids: Any, scores: Any) -> Any:
        """Choose the next token of each unfinished sequence, and return scores that allow only this token."""
        self.count += 1
        chosen = [self._model.pad_token_id] * len(self._rows)
        got: list[Row] = []
        outcomes: list[tuple[Job, TokenDelta | RequestError]] = []
        for place, choice in enumerate(self._sampler.choose(input_ids, scores)):
            row = self._rows[place]
            if row.done:
                continue
            before = len(row.sequence.token_ids)
            outcome = _advance(row, choice)
            if isinstance(outcome, RequestError):
                for sibling in row.job.rows:
                    sibling.finished = True
            elif len(row.sequence.token_ids) > before:
                chosen[place] = row.sequence.token_ids[-1]
                got.append(row)
            if outcome is not None:
                outcomes.append((row.job, outcome))
        self._batch.moved_at = time.monotonic()
        self._post(self._batch.moved_at, got, outcomes)
        return scores.fill_(-torch.inf).scatter_(1, torch.tensor(chosen, device=scores.device)[:, None], 0.0)

    def stopped(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Return which rows have ended or were cancelled."""
        return torch.tensor([row.done for row in self._rows], device=input_ids.device)


def _advance(row: Row, choice: Choice | RequestError) -> TokenDelta | RequestError | None:
    """Add a choice to its sequence, or end the sequence if its job was aborted. An error fails only this request."""
    if isinstance(choice, RequestError):
        return choice
    try:
        return row.sequence.abort(row.job.at_deadline) if row.job.aborted else row.sequence.add(choice)
    except Exception:
        logger.exception("request %s: internal error while handling a token", row.job.request.request_id)
        return GenerationFailed("internal error while handling a token")


def beam_deltas(job: Job, beams: Sequence[Sequence[int]], model: TransformersModel) -> list[TokenDelta]:
    """Return one delta for each beam of a search.

    If the job was aborted, unfinished beams end with `ABORT`, or with `LENGTH` at a deadline.

    Args:
        beams: The tokens of the beams, best first. Empty before the first step.
    """
    assert job.request.beam_search is not None
    whole = msgspec.structs.replace(job.request, stream=False)
    width = job.request.beam_search.width
    deltas = []
    for rank in range(width):
        sequence = BatchSequence(whole, job.prompt_ids, model, rank)
        token_ids = beams[rank] if rank < len(beams) else ()
        if not job.aborted:
            sequence.limit = len(token_ids)
        # `BatchSequence` may end before the beam's last token, because its rules for the end differ slightly from those
        # of `generate`.
        added = (sequence.add(Choice(token_id)) for token_id in token_ids)
        delta = next((delta for delta in added if delta is not None), None) or sequence.abort(job.at_deadline)
        assert delta is not None
        delta.last = rank == width - 1
        deltas.append(delta)
    return deltas


def padded(prompts: Sequence[Sequence[int]], model: TransformersModel) -> dict[str, Any]:
    """Return prompts as one batch. They are padded on the left, because generated tokens follow on the right."""
    longest = max(map(len, prompts))
    ids = [[model.pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


_CHUNK = 256  # The number of tokens in one pass. The logits of all tokens of a long prompt would take gigabytes.


class BatchSequence:
    """Turns the chosen tokens of a sequence into deltas, and decides when the sequence ends.

    The sequence ends at the model's end token, at a stop token or stop string of the request, at the limit on new
    tokens, or at the end of the model's context. Text that may be the beginning of a stop string is held back.
    """

    def __init__(
        self, request: GenerationRequest, prompt_ids: Sequence[int], model: TransformersModel, sequence: int = 0
    ) -> None:
        s = request.sampling
        self._request, self._model, self._sequence = request, model, sequence
        self._prompt_ids = prompt_ids
        room = model.max_model_len - len(prompt_ids)
        # After this many tokens, the sequence ends with `FinishReason.LENGTH`.
        self.limit = room if s.max_tokens is None else min(s.max_tokens, room)
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        # The caller sets this before the first token if the request wants the prompt's tokens.
        self.prompt_logprobs: list[float] | None = None
        self._cumulative_logprob: float | None = None
        self._texts = TokenTexts(model.tokenizer, prompt_ids, s.skip_special_tokens)
        self._stop = StopStrings(s.stop, s.include_stop_str_in_output)
        self._held = ""
        self._pending = HeldTokens()
        self._prompt_tokens_due = request.want_prompt_tokens

    def add(self, choice: Choice) -> TokenDelta | None:
        """Add the next token. Return a delta, or None if the sink gets nothing yet.

        The final delta has a `finish_reason`. Its `last` is True, as if the request had only this sequence.
        """
        self.token_ids.append(choice.token_id)
        if choice.logprob is not None:
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + choice.logprob
        self.finish_reason = self._reason(choice.token_id)
        stops = self.finish_reason in (FinishReason.EOS, FinishReason.STOP)
        is_hidden = stops and not self._request.sampling.include_stop_str_in_output
        piece = "" if is_hidden else self._texts.add(choice.token_id)
        self._held += piece
        if self._request.want_tokens:
            self._pending.add(self._token(choice, piece))
        surplus = self._stop.add(piece, count=len(self.token_ids) > self._request.sampling.min_tokens)
        if surplus is not None:
            self.finish_reason = FinishReason.STOP
            self._held = self._held[: len(self._held) - surplus]
        if self.finish_reason is None and not self._request.stream:
            return None
        return self._delta()

    def abort(self, at_deadline: bool = False) -> TokenDelta | None:
        """End the sequence. Return its last delta, or None if it had already ended."""
        if self.finish_reason is not None:
            return None
        self.finish_reason = FinishReason.LENGTH if at_deadline else FinishReason.ABORT
        if (delta := self._delta()) is not None and at_deadline:
            delta.stop_reason = DEADLINE
        return delta

    def _reason(self, token_id: int) -> FinishReason | None:
        s, eos = self._request.sampling, self._model.eos_token_ids
        ends = token_id in eos and not s.ignore_eos
        # If the request lists an end token as a stop token, it counts as a stop token. The tokenizer's own end token is
        # an exception.
        if ends and (token_id not in s.stop_token_ids or token_id == self._model.tokenizer.eos_token_id):
            return FinishReason.EOS
        if token_id in s.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.limit else None

    def _token(self, choice: Choice, piece: str) -> Token:
        special = self._model.special_ids
        ranked = self._request.want_ranks
        top = tuple(
            Token(i, self._model.tokenizer.decode([i]), value, i in special, (), place if ranked else None)
            for place, (i, value) in enumerate(choice.top, start=1)
        )
        rank = choice.rank if ranked else None
        return Token(choice.token_id, piece, choice.logprob, choice.token_id in special, top, rank)

    def _delta(self) -> TokenDelta | None:
        finished = self.finish_reason is not None
        end = len(self._held) - (0 if finished else self._stop.held())
        text, self._held = self._held[:end], self._held[end:]
        tokens = self._pending.release(len(text), finished)
        if not (text or tokens or finished or self._prompt_tokens_due):
            return None
        delta = TokenDelta(text, tokens, self._sequence, None, len(self._prompt_ids), len(self.token_ids))
        delta.cumulative_logprob = self._cumulative_logprob
        if self._prompt_tokens_due:
            self._prompt_tokens_due = False
            model, logprobs = self._model, self.prompt_logprobs or ()
            delta.prompt_tokens = prompt_tokens(model.tokenizer, self._prompt_ids, model.special_ids, logprobs)
        if finished:
            delta.finish_reason = self.finish_reason
            delta.last = True
        return delta


@torch.no_grad()  # type: ignore[untyped-decorator]
def read_prompt(model: TransformersModel, prompt_ids: Sequence[int]) -> list[float]:
    """Return the log probability of each token of a prompt, beginning with the second token."""
    values: list[float] = []
    cache = None
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    last = len(prompt_ids) - 1
    for begin in range(0, last, _CHUNK):
        end = min(begin + _CHUNK, last)
        output: Any = model.model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logprobs = output.logits[0].float().log_softmax(dim=-1)
        values += logprobs.gather(-1, ids[0, begin + 1 : end + 1, None])[:, 0].tolist()
    return values
