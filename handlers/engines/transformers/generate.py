"""Runs one batch of requests with transformers' `model.generate`, in the engine's thread.

Every sequence chooses its own tokens (`TokenChooser`) and ends by its own rules (`GeneratedSequence`), from within a
logits processor and a stopping criterion; `generate` gives padding, KV cache and the steps. What has been generated
stays with the sequence, so that a batch that fails half-way goes on where it was: in halves where memory ran out, each
sequence alone where something else broke.
"""

from __future__ import annotations

import gc
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from handlers.engines.protocol import Sink
from handlers.engines.transformers.model import TransformersModel
from handlers.engines.transformers.sampling import Choice, TokenChooser, choose_rows
from handlers.engines.transformers.sequence import GeneratedSequence, read_prompt
from handlers.errors import GenerationFailed, RequestError
from handlers.request import GenerationRequest, SamplingParameters, TokenDelta

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence on its way. Belongs to the engine's thread."""

    job: Job
    chooser: TokenChooser
    sequence: GeneratedSequence
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    last_at: float = 0.0
    """When its last token came; belongs to the event loop."""

    @property
    def done(self) -> bool:
        """No further token is wanted."""
        return self.finished or self.job.ended


@dataclass(slots=True, eq=False)
class Job:
    """A request with all its sequences. Belongs to the event loop, but for what `rows` says."""

    request: GenerationRequest
    prompt_ids: list[int]
    sink: Sink
    limit: int
    """New tokens at most, by the request and by the model's context."""
    arrived_at: float
    rows: list[Row] = field(default_factory=list)
    """Empty for a beam search."""
    open_sequences: int = 1
    """Sequences, or beams, that have not finished; belongs to the event loop."""
    ended: bool = False
    """Nothing more reaches the sink. The engine's thread reads it before each step."""
    aborted: bool = False
    """It shall end with what there is. The engine's thread reads it before each step."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step."""

    at: float
    rows: Sequence[Row]
    """Those that got a token."""
    outcomes: Sequence[tuple[Job, TokenDelta | RequestError]]


@dataclass(slots=True, eq=False)
class Batch:
    """Jobs that run together; all have the same parameters."""

    jobs: list[Job]
    moved_at: float = field(default_factory=time.monotonic)
    """When it began, and then when its last step was."""


class BatchRunner:
    """Runs batches on one model; `post` hands each step to the event loop."""

    def __init__(self, model: TransformersModel, post: Callable[[Step], None]) -> None:
        self._model, self._post = model, post
        self._pads = "attention_mask" in inspect.signature(model.model.forward).parameters
        # The request alone says how to generate; what the model's own configuration has would be added to it.
        model.model.generation_config = GenerationConfig(pad_token_id=model.pad_token_id)

    def try_out(self) -> None:
        """Generate one token; raises whatever keeps the model from it."""
        inputs = padded([[self._model.pad_token_id]], self._model)
        self._model.model.generate(**inputs, generation_config=GenerationConfig(do_sample=False, max_new_tokens=1))

    def run(self, batch: Batch) -> None:
        """Run a batch to its end; every job of it ends with its last delta or an error.

        Raises:
            DeviceLost: nothing can be run any more.
        """
        for jobs in self._together(batch.jobs):
            if jobs[0].request.beam_search is None:
                self._attempt(batch, [row for job in jobs for row in job.rows], self._generate)
            else:
                self._attempt(batch, jobs, self._search)

    def _together(self, jobs: list[Job]) -> list[list[Job]]:
        """A model that knows no attention mask would take padding for text: it gets prompts of one length at a time."""
        if self._pads:
            return [jobs]
        by_length: dict[int, list[Job]] = {}
        for job in jobs:
            by_length.setdefault(len(job.prompt_ids), []).append(job)
        return list(by_length.values())

    def _attempt(self, batch: Batch, items: Sequence[Any], run: Callable[[Batch, Any], None]) -> None:
        """Run `items` together; if that fails, in parts, so that only the guilty fail."""
        items = [item for item in items if not _done(item)]
        if not items:
            return
        try:
            run(batch, items)
            return
        except Exception as caught:
            no_memory = out_of_memory(caught)
            if not no_memory:
                logger.exception("a batch of %d has failed", len(items))
        # Here the exception is gone, and with it the tensors that its traceback held.
        free_memory(self._model.device)
        if len(items) == 1:
            reason = (
                "the request needs more memory than there is, even alone"
                if no_memory
                else "internal error while generating"
            )
            self._fail(items[0], GenerationFailed(reason))
            return
        logger.warning("a batch of %d did not fit or failed; trying it in parts", len(items))
        middle = len(items) // 2
        parts = [items[:middle], items[middle:]] if no_memory else [[item] for item in items]
        for part in parts:
            batch.moved_at = time.monotonic()
            self._attempt(batch, part, run)

    def _fail(self, item: Job | Row, error: RequestError) -> None:
        job = item.job if isinstance(item, Row) else item
        for row in job.rows:
            row.finished = True
        self._post(Step(time.monotonic(), (), ((job, error),)))

    def _generate(self, batch: Batch, rows: list[Row]) -> None:
        for row in rows:
            job = row.job
            if job.request.want_prompt_tokens and row.sequence.prompt_reading is None:
                known = job.rows[0].sequence.prompt_reading
                row.sequence.prompt_reading = known or read_prompt(self._model, job.prompt_ids, job.request.want_ranks)
                batch.moved_at = time.monotonic()
        # Rows that have finished are padded along with the others, and must not leave the model's context either.
        while rows:
            self._generate_within(batch, rows)
            rows = [row for row in rows if not row.done]

    def _generate_within(self, batch: Batch, rows: list[Row]) -> None:
        """Generate until all rows have ended, or the longest has come to the end of the context."""
        texts = [row.job.prompt_ids + row.token_ids for row in rows]
        room = self._model.max_model_len - max(map(len, texts))
        wanted = max(row.sequence.limit - len(row.token_ids) for row in rows)
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
            ended = row.sequence.limit <= len(row.token_ids) or not steps.count
            if ended and not row.done:
                self._fail(row, GenerationFailed("generation ended before the sequence did"))

    def _search(self, batch: Batch, jobs: list[Job]) -> None:
        """Beam search; jobs that have less room than others run apart, since `generate` has one limit for all."""
        for limit in sorted({job.limit for job in jobs}):
            some = [job for job in jobs if job.limit == limit and not job.ended]
            if some:
                self._search_within(batch, some, limit)

    def _search_within(self, batch: Batch, jobs: list[Job], limit: int) -> None:
        model, sampling, options = self._model, jobs[0].request.sampling, jobs[0].request.beam_search
        assert options is not None
        told: set[Job] = set()

        def step(beams: Any) -> bool:
            """Take the tokens so far of the running beams, as many for each job, best first; say whether to stop."""
            batch.moved_at = time.monotonic()
            for place, job in enumerate(jobs):
                if job.aborted and not job.ended and job not in told:
                    told.add(job)
                    each = len(beams) // len(jobs)
                    so_far = beams[place * each : (place + 1) * each].tolist()
                    deltas = beam_deltas(job.request, job.prompt_ids, model, so_far)
                    self._post(Step(batch.moved_at, (), [(job, delta) for delta in deltas]))
            return all(job.ended or job in told for job in jobs)

        inputs = padded([job.prompt_ids for job in jobs], model)
        start = inputs["input_ids"].shape[1]
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
            stopping_criteria=StoppingCriteriaList([_Stop(model, sampling, start, step)]),
        )
        # What follows a beam's own tokens is padding, which may look like tokens.
        lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
        beams = [ids[:length] for ids, length in zip(found.sequences[:, start:].tolist(), lengths, strict=True)]
        outcomes = []
        for place, job in enumerate(jobs):
            own = beams[place * options.width : (place + 1) * options.width]
            outcomes += [(job, delta) for delta in beam_deltas(job.request, job.prompt_ids, model, own, ended=True)]
        self._post(Step(time.monotonic(), (), outcomes))


class _Steps:
    """The logits processor (`choose`) and stopping criterion (`stopped`) of one call of `generate`."""

    def __init__(self, batch: Batch, rows: list[Row], model: TransformersModel, post: Callable[[Step], None]) -> None:
        self._batch, self._rows, self._model, self._post = batch, rows, model, post
        self.count = 0
        """Steps so far."""

    def choose(self, input_ids: Any, scores: Any) -> Any:
        """Have each unfinished sequence choose its token, and leave `generate` nothing else to choose."""
        self.count += 1
        self._abort()
        open_places = [place for place, row in enumerate(self._rows) if not row.done]
        chosen = [self._model.pad_token_id] * len(self._rows)
        if open_places:
            rows = [self._rows[place] for place in open_places]
            logits = scores if len(rows) == len(self._rows) else scores[open_places]
            choices = choose_rows([row.chooser for row in rows], logits)
            got: list[Row] = []
            outcomes: list[tuple[Job, TokenDelta | RequestError]] = []
            for place, row, choice in zip(open_places, rows, choices, strict=True):
                outcome = _advance(row, choice)
                if not isinstance(choice, RequestError):
                    chosen[place] = choice.token_id
                    got.append(row)
                if outcome is not None:
                    outcomes.append((row.job, outcome))
            self._batch.moved_at = time.monotonic()
            self._post(Step(self._batch.moved_at, got, outcomes))
        return scores.fill_(-torch.inf).scatter_(1, torch.tensor(chosen, device=scores.device)[:, None], 0.0)

    def _abort(self) -> None:
        """End what shall end with what there is."""
        outcomes: list[tuple[Job, TokenDelta | RequestError]] = []
        for row in self._rows:
            if row.job.aborted and not row.done and (outcome := _aborted(row)) is not None:
                outcomes.append((row.job, outcome))
        if outcomes:
            self._post(Step(time.monotonic(), (), outcomes))

    def stopped(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Tell which rows have ended, or have nobody waiting for them any more."""
        return torch.tensor([row.done for row in self._rows], device=input_ids.device)


def _advance(row: Row, choice: Any) -> TokenDelta | RequestError | None:
    """Add a choice to its sequence. What goes wrong is this request's alone."""
    if isinstance(choice, RequestError):
        return _ended(row, choice)
    row.token_ids.append(choice.token_id)
    try:
        delta: TokenDelta | None = row.sequence.add(choice)
    except Exception:
        logger.exception("request %s: internal error while handling a token", row.job.request.request_id)
        return _ended(row, GenerationFailed("internal error while handling a token"))
    row.finished = row.finished or row.sequence.finish_reason is not None
    return delta


def _aborted(row: Row) -> TokenDelta | RequestError | None:
    row.finished = True
    try:
        return row.sequence.abort()
    except Exception:
        logger.exception("request %s: internal error while it was aborted", row.job.request.request_id)
        return _ended(row, GenerationFailed("internal error while the request was aborted"))


def _ended(row: Row, error: RequestError) -> RequestError:
    for sibling in row.job.rows:
        sibling.finished = True
    return error


def _done(item: Job | Row) -> bool:
    return item.done if isinstance(item, Row) else item.ended


class _Stop:
    """Ends beams whose text holds a stop string."""

    def __init__(
        self, model: TransformersModel, sampling: SamplingParameters, start: int, step: Callable[[Any], bool]
    ) -> None:
        self._tokenizer, self._stop, self._start, self._step = model.tokenizer, sampling.stop, start, step
        self._min_tokens = sampling.min_tokens
        self._reach = 4 * max(map(len, sampling.stop), default=0) + 1  # a character takes four tokens at most

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self._step(input_ids[:, self._start :]):
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if not self._stop or input_ids.shape[1] - self._start <= self._min_tokens:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        tails = input_ids[:, max(self._start, input_ids.shape[1] - self._reach) :].tolist()
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True)
        hits = [any(string in text for string in self._stop) for text in texts]
        return torch.tensor(hits, device=input_ids.device)


def beam_deltas(
    request: GenerationRequest,
    prompt_ids: Sequence[int],
    model: TransformersModel,
    beams: Sequence[Sequence[int]],
    *,
    ended: bool = False,
) -> list[TokenDelta]:
    """Return one delta for each beam of a search; `beams`: their tokens, best first, none before the first step.

    `ended`: the search has ended, and each beam with it. Otherwise a beam that has not come to its own end is aborted.
    """
    assert request.beam_search is not None
    whole = msgspec.structs.replace(request, stream=False)
    width = request.beam_search.width
    deltas = []
    for rank in range(width):
        sequence = GeneratedSequence(whole, prompt_ids, model, rank)
        token_ids = beams[rank] if rank < len(beams) else ()
        if ended:
            sequence.limit = len(token_ids)
        choices = (Choice(token_id, None) for token_id in token_ids)
        # Not always the last token: what the beam's end is judged by differs a little from what the sequence's is.
        delta = next((delta for choice in choices if (delta := sequence.add(choice)) is not None), None)
        delta = delta or sequence.abort()
        assert delta is not None
        delta.last = rank == width - 1
        deltas.append(delta)
    return deltas


def padded(prompts: Sequence[Sequence[int]], model: TransformersModel) -> dict[str, Any]:
    """Return prompts as one batch, padded on the left: generated tokens follow on the right."""
    longest = max(map(len, prompts))
    ids = [[model.pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


def out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that there is not enough memory, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # PyTorch has no class for running out of the host's memory.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def free_memory(device: Any) -> None:
    """Free what a failed pass has left; to be called once its exception is gone, whose traceback holds tensors.

    Raises:
        DeviceLost: the device computes no more.
    """
    gc.collect()
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.ones(2, device=device).sum().item()
    except Exception as error:
        raise DeviceLost(str(error)) from error


class DeviceLost(Exception):
    """The device does not compute any more; nothing in this process will bring it back."""
