"""The handler of calls with a customer's formatters, in the modes without option.async_mode.

Formatters may block. So parsing a call and making its answer both run in the thread of the formatters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engines.errors import GenerationFailed, Overloaded, RequestError
from engines.request import TokenDelta
from handlers.contract import Call, Contract, Exchange, Reply, ReplyWriter
from handlers.custom.formatter_thread import FormatterQueue, FormatterThread
from handlers.djl_errors import failed_dependency
from handlers.engine_handler import EngineHandler
from handlers.queue import EngineQueue
from handlers.running_call import RunningCall


class FormatterHandler(EngineHandler):
    """Answers calls with an engine, through a contract that calls a customer's formatters."""

    def __init__(
        self,
        queue: EngineQueue,
        contract: Contract,
        thread: FormatterThread,
        refuse_unread: Callable[[Overloaded], Reply] | None = None,
    ) -> None:
        super().__init__(queue, contract, refuse_unread=refuse_unread)
        self._thread = thread

    async def _parse(self, call: Call) -> Exchange:
        try:
            return await self._thread.run(partial(self._contract.parse, call))
        except RequestError as error:
            raise failed_dependency(error.message) from None

    def _running_call(self, exchange: Exchange, writer: ReplyWriter, request_id: str) -> RunningCall:
        return FormattedCall(self._queue, exchange, writer, request_id, self._thread)


class FormattedCall(RunningCall):
    """A running call whose answer is made in the thread of the formatters, in order."""

    def __init__(
        self, queue: EngineQueue, exchange: Exchange, writer: ReplyWriter, request_id: str, thread: FormatterThread
    ) -> None:
        super().__init__(queue, exchange, writer, request_id)
        self._deltas: FormatterQueue[tuple[int, TokenDelta]] = FormatterQueue(
            thread, lambda item: self._answer.feed(*item), self._take
        )

    def on_delta(self, delta: TokenDelta, prompt: int = 0) -> None:
        if not self.answered:
            self._deltas.put((prompt, delta))

    def _take(self, done: list[tuple[tuple[int, TokenDelta], bytes]], error: Exception | None) -> None:
        for (prompt, delta), data in done:
            if not self.answered:
                self._write(prompt, delta, data)
        if error is not None:
            self.on_error(error if isinstance(error, RequestError) else GenerationFailed(f"internal error: {error}"))

    def _close(self) -> None:
        super()._close()
        self._deltas.close()
