"""Finds out at the start whether an engine gives the tokens that the model gives by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from handlers.daemon_thread import in_daemon_thread
from handlers.engines.protocol import EngineStartError, Sink
from handlers.engines.start_failure import failure_of
from handlers.engines.transformers_batching import ContinuousBatching
from handlers.engines.transformers_model import TransformersModel
from handlers.errors import EngineDead, RequestError
from handlers.request import GenerationRequest, SamplingParameters, TokenDelta

_PROMPT_TOKENS = 12
_NEW_TOKENS = 4
_STRIDE = 7919
"""A prime number: the prompt's tokens come from all over the vocabulary."""
_LOOK_SECONDS = 0.25
_CAUSE_SECONDS = 5.0
"""What the manager's thread may take to end once it has failed."""
_TOLERANCE = 0.25
"""Standard deviations of the logits by which rounding may part two tokens that come nearly first together."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt, and the model's own logits for each of the tokens that follow greedily."""

    prompt_ids: tuple[int, ...]
    logits: tuple[Any, ...]

    def request(self) -> GenerationRequest:
        """What the engine is asked for."""
        return GenerationRequest(
            request_id="start",
            prompt=self.prompt_ids,
            sampling=SamplingParameters(max_tokens=len(self.logits), ignore_eos=True),
            want_tokens=True,
        )

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """Whether these are the tokens that follow; where two come nearly first together, either is right."""
        for logits, token_id in zip(self.logits, token_ids, strict=True):
            best, std = logits.max(), logits.std()
            if token_id != int(logits.argmax()):
                # What follows another token cannot be compared any more.
                return bool(logits[token_id] >= best - _TOLERANCE * std)
        return True


@torch.no_grad()  # type: ignore[untyped-decorator]
def reference(model: TransformersModel) -> Reference:
    """Generate greedily with plain passes over the whole text, one for each token."""
    length = max(min(_PROMPT_TOKENS, model.max_model_len - _NEW_TOKENS), 1)
    prompt_ids = [_STRIDE * (place + 1) % model.vocabulary_size for place in range(length)]
    token_ids, logits = list(prompt_ids), []
    for _ in range(min(_NEW_TOKENS, model.max_model_len - length)):
        output = model.model(input_ids=torch.tensor([token_ids], device=model.device))
        logits.append(output.logits[0, -1].float().cpu())
        token_ids.append(int(logits[-1].argmax()))
    return Reference(tuple(prompt_ids), tuple(logits))


async def try_out(
    expected: Reference,
    batching: ContinuousBatching,
    submit: Callable[[GenerationRequest, Sink], Awaitable[object]],
    model_id: str,
) -> None:
    """Generate first tokens on the engine, whose manager runs, and compare them. `submit`: the engine's own.

    Raises:
        EngineStartError: it cannot run the model, or gives other tokens than the model by itself.
        RequestError: it has refused the request, or failed it.
    """
    answer = Answer()
    with contextlib.suppress(EngineDead):
        await submit(expected.request(), answer)
    while not answer.ended.is_set() and batching.failure is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer.ended.wait(), _LOOK_SECONDS)
    if batching.failure is not None:
        cause = await in_daemon_thread(lambda: batching.cause(_CAUSE_SECONDS))
        raise failure_of(RuntimeError(cause)).error(f"transformers cannot run {model_id}")
    if answer.error is not None:
        raise answer.error
    if not expected.agrees(answer.token_ids):
        raise EngineStartError(
            f"transformers' continuous batching gives other tokens of {model_id} than the model by itself; "
            "option.rolling_batch=disable runs it"
        )


class Answer:
    """A sink that keeps the tokens of a request."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.token_ids: list[int] = []
        self.error: RequestError | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        """See `Sink`."""
        self.token_ids += [token.id for token in delta.tokens]
        if delta.last:
            self.ended.set()

    def on_error(self, error: RequestError) -> None:
        """See `Sink`."""
        self.error = error
        self.ended.set()
