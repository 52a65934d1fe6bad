"""Log probabilities of prompts on transformers' continuous batching, which does not give them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from handlers.engines.transformers_batching import ContinuousBatching
from handlers.engines.transformers_model import TransformersModel
from handlers.engines.transformers_prompt import PromptPass
from handlers.engines.transformers_running import RunningSequence
from handlers.errors import GenerationFailed, RequestError

logger = logging.getLogger(__name__)


class PromptReader:
    """Reads the prompts of requests that want log probabilities of them, before they are handed to the manager.

    One prompt is read at a time, since each has a KV cache of its own, and a chunk of it before each of the manager's
    steps. For the event loop alone.
    """

    def __init__(
        self,
        model: TransformersModel,
        batching: ContinuousBatching,
        add: Callable[[RunningSequence], None],
        discard: Callable[[RunningSequence], None],
    ) -> None:
        """`add`: hands a sequence over whose prompt is read. `discard`: frees one that fails."""
        self._model, self._batching, self._add, self._discard = model, batching, add, discard
        self._one_reads = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, sequences: list[RunningSequence]) -> None:
        """Read the prompt that these sequences share; then they are added."""
        task = asyncio.create_task(self._read(sequences))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Read nothing any more; whoever waits for it has been told."""
        for task in self._tasks:
            task.cancel()

    async def _read(self, sequences: list[RunningSequence]) -> None:
        error: RequestError | None = None
        try:
            reading = await self._whole_prompt(sequences)
            for sequence in sequences:
                if not sequence.ended:
                    sequence.text.prompt_reading = reading
                    self._add(sequence)
        except RequestError as caught:
            error = caught
        except Exception:
            logger.exception("request %s: the prompt's log probabilities have failed", sequences[0].name)
            error = GenerationFailed("internal error while reading the prompt")
        if error is not None:
            for sequence in sequences:
                self._discard(sequence)
                sequence.fail(error)

    async def _whole_prompt(self, sequences: Sequence[RunningSequence]) -> PromptPass:
        reading = PromptPass(self._model, sequences[0].prompt_ids, sequences[0].want_ranks)
        async with self._one_reads:
            while not reading.done and not all(sequence.ended for sequence in sequences):
                await self._between_steps(reading.read)
                for sequence in sequences:
                    sequence.last_at = time.monotonic()
        return reading

    async def _between_steps(self, work: Callable[[], None]) -> None:
        """Wait until the manager's thread has done `work`; raises what that raises."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        errors: list[Exception] = []

        def run() -> None:
            try:
                work()
            except Exception as error:
                errors.append(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done.set)

        self._batching.between_steps(run)
        await done.wait()
        if errors:
            raise errors[0]
