"""An engine with tokens and failures that a test decides."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engines.errors import EngineDead
from engines.interface import CopyState, EngineCopy, EngineHealth, ExplainedRequest, Generation, Sink
from engines.loaded_model import EngineStatus
from engines.request import DEADLINE, FinishReason, GenerationRequest, Token, TokenDelta
from engines.statistics import EngineStatistics


class ScriptedGeneration:
    """A request of a ScriptedEngine. An abort hands over one more token, as if the engine had kept it back."""

    def __init__(self, request: GenerationRequest, sink: Sink, engine: ScriptedEngine) -> None:
        self.cancelled = self.aborted = False
        self.request, self._sink, self._engine = request, sink, engine

    def cancel(self) -> None:
        self.cancelled = True

    def abort(self, *, at_deadline: bool = False) -> None:
        self.aborted = True
        reason, stop = (FinishReason.LENGTH, DEADLINE) if at_deadline else (FinishReason.ABORT, None)
        for sequence in range(self.request.sequences):
            last = sequence == self.request.sequences - 1
            self._sink.on_delta(TokenDelta("!", [], sequence, reason, 3, 1, last=last, stop_reason=stop))

    @property
    def begun(self) -> bool:
        return self.request.pooling is None and self._engine.begun


class ScriptedEngine:
    """An engine that generates nothing: the test pushes deltas and errors into `sinks`."""

    max_model_len = 100
    max_top_tokens = 20
    pooling = None
    takes_images = False
    eos_token_ids = frozenset({0})
    tokenizer = None
    adapters = None

    def __init__(self) -> None:
        self.statistics = EngineStatistics()
        self.sinks: list[Sink] = []
        self.running: list[ScriptedGeneration] = []
        self.begun = True  # The value of `Generation.begun` for all requests that generate.
        self.not_held: tuple[str, ...] = ()  # The parts of each request's schema that the engine does not hold.
        self.failures: dict[int, Exception] = {}  # The errors that `submit` raises, by the request's number.

    async def start(self) -> None: ...

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        if (failure := self.failures.get(len(self.sinks))) is not None:
            if isinstance(failure, EngineDead):
                self.sinks[0].on_error(failure)
            raise failure
        if self.not_held:
            sink.on_not_held(self.not_held)
        self.sinks.append(sink)
        self.running.append(ScriptedGeneration(request, sink, self))
        return self.running[-1]

    async def explain(self, request: GenerationRequest) -> ExplainedRequest:
        if self.failures:
            raise self.failures[0]
        parameters = msgspec.to_builtins(request.sampling) | {"n": request.candidates}
        token_ids = await self.prompt_token_ids(request)
        salt = request.cache_salt or None
        return ExplainedRequest(
            token_ids=token_ids, parameters=parameters, not_held=self.not_held, copy=1, cache_salt=salt
        )

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        return [1]

    def tokenize(self, text: str) -> Sequence[int]:
        return [1]

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        return []

    def health(self) -> EngineHealth:
        return EngineHealth(True)

    @property
    def copies(self) -> Sequence[EngineCopy]:
        return [EngineCopy(1, CopyState.READY, 0.0)]

    def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0.0)

    async def stop(self) -> None: ...
