"""Beam search with transformers' own `generate`, for a batch of prompts.

As with vLLM, scores are sums of the model's log probabilities over length to the power of `length_penalty`;
sampling parameters and penalties do not apply. Beams carry no log probabilities: `generate` would have to keep those of
the whole vocabulary for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from transformers import GenerationConfig, StoppingCriteriaList

from handlers.engines.transformers_model import TransformersModel
from handlers.engines.transformers_sampling import Choice
from handlers.engines.transformers_sequence import GeneratedSequence
from handlers.request import GenerationRequest, SamplingParameters, TokenDelta

_CHARACTER_TOKENS = 4
"""A character may take so many tokens."""


def beam_search(
    model: TransformersModel,
    requests: Sequence[tuple[GenerationRequest, Sequence[int]]],
    inputs: dict[str, Any],
    limit: int,
    step: Callable[[Any], bool],
) -> list[list[TokenDelta]]:
    """The deltas of each request, given with its prompt's token ids: all its beams, best first.

    `inputs`: the prompts, padded; `limit`: new tokens at most; `step` is called in each step with the new tokens of the
    running beams, as many for each request, best first, and says whether to stop. The requests have the same
    parameters.
    """
    options, sampling = requests[0][0].beam_search, requests[0][0].sampling
    assert options is not None
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
    start = inputs["input_ids"].shape[1]
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
    sequences = found.sequences[:, start:].tolist()
    beams = [ids[:length] for ids, length in zip(sequences, lengths, strict=True)]
    return [
        _deltas(request, prompt_ids, model, beams[place * options.width : (place + 1) * options.width])
        for place, (request, prompt_ids) in enumerate(requests)
    ]


class _Stop:
    """Ends beams whose text holds a stop string."""

    def __init__(
        self, model: TransformersModel, sampling: SamplingParameters, start: int, step: Callable[[Any], bool]
    ) -> None:
        self._tokenizer, self._stop, self._start, self._step = model.tokenizer, sampling.stop, start, step
        self._min_tokens = sampling.min_tokens
        self._reach = _CHARACTER_TOKENS * max(map(len, sampling.stop), default=0) + 1

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self._step(input_ids[:, self._start :]):
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if not self._stop or input_ids.shape[1] - self._start <= self._min_tokens:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        tails = input_ids[:, max(self._start, input_ids.shape[1] - self._reach) :].tolist()
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True)
        hits = [any(string in text for string in self._stop) for text in texts]
        return torch.tensor(hits, device=input_ids.device)


def _deltas(
    request: GenerationRequest, prompt_ids: Sequence[int], model: TransformersModel, beams: Sequence[Sequence[int]]
) -> list[TokenDelta]:
    whole = msgspec.structs.replace(request, stream=False)
    deltas = []
    for rank, token_ids in enumerate(beams):
        sequence = GeneratedSequence(whole, prompt_ids, model, rank)
        sequence.limit = len(token_ids)
        steps = [sequence.add(Choice(token_id, None)) for token_id in token_ids]
        # Not always the last step: what the beam's end is judged by differs a little from what the sequence's is.
        delta = next(delta for delta in steps if delta is not None)
        delta.last = rank == len(beams) - 1
        deltas.append(delta)
    return deltas


def aborted_beams(
    request: GenerationRequest, prompt_ids: Sequence[int], model: TransformersModel, beams: Sequence[Sequence[int]]
) -> list[TokenDelta]:
    """The deltas of a search that ends before its time; `beams`: the tokens so far, best first, none before the first.

    A beam that has come to its own end with its latest token has that one's finish reason.
    """
    assert request.beam_search is not None
    whole = msgspec.structs.replace(request, stream=False)
    width = request.beam_search.width
    deltas = []
    for rank in range(width):
        sequence = GeneratedSequence(whole, prompt_ids, model, rank)
        delta: TokenDelta | None = None
        for token_id in beams[rank] if rank < len(beams) else ():
            if (delta := sequence.add(Choice(token_id, None))) is not None:
                break
        if delta is None:
            delta = sequence.abort()
        assert delta is not None
        delta.last = rank == width - 1
        deltas.append(delta)
    return deltas
