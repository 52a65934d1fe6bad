"""What of a request runs in vLLM, and how it is ended there."""

from __future__ import annotations

import asyncio
import logging

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from handlers.engines.vllm_output import PushedState

logger = logging.getLogger(__name__)


class VllmGeneration:
    """The sequences of one request; see `Generation`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.states: list[PushedState] = []

    def cancel(self) -> None:
        """See `Generation.cancel`."""
        running = self._running()
        for state in running:
            if not state.ended:
                state.end()
                state.meter.aborted_requests += 1
        self._stop(running)

    def abort(self) -> None:
        """See `Generation.abort`."""
        running = self._running()
        for state in running:
            state.abort()
        self._stop(running)

    def _running(self) -> list[PushedState]:
        """The sequences that vLLM still has; whoever asks ends them."""
        known = self._llm.output_processor.request_states
        states, self.states = self.states, []
        return [state for state in states if state.request_id in known]

    def _stop(self, states: list[PushedState]) -> None:
        if states and not self._llm.errored:
            self._task = asyncio.ensure_future(self._abort([state.request_id for state in states]))

    async def _abort(self, request_ids: list[str]) -> None:
        try:
            await self._llm.abort(request_ids, internal=True)
        except EngineDeadError:
            logger.debug("nothing to abort: the engine has died")
