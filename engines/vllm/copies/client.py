"""One client for the processes of all copies. vLLM's `AsyncLLM` takes it for the client of one engine process.

vLLM has a client for the processes of one engine. Each copy has such a client. The client here sends each request to
one copy, puts the messages of all copies into one queue, and calls methods such as `add_lora` on every copy. So vLLM's
front end and Slipway's requests share one output loop, one list of sequences and one tokenizer.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
from vllm.exceptions import GenerationError
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from engines.daemon_thread import LastingThreads
from engines.interface import CopyState, Progress
from engines.vllm.copies import core_client
from engines.vllm.copies.choice import MOST_ANSWER_TOKENS, CopyChoice
from engines.vllm.copies.places import Place

_ANYWHERE = Place()
_MOST_QUERIES = 4096  # Whose documents may still come.


class Copy:
    """The processes of a copy, from their start to their end. The copy that replaces it has the same number."""

    def __init__(self, number: int, place: Place = _ANYWHERE) -> None:
        self.number, self.place = number, place
        self.state = CopyState.STARTING
        self.started_at = time.time()
        self.threads = LastingThreads(f"copy {number}")  # Start the processes, which end with them.
        self.client: AsyncMPClient | None = None  # None until the model is loaded.
        self.workers: Mapping[psutil.Process, str] = {}  # The workers and their titles, when the model was loaded.
        self.given_up = False  # It has died, and is not started again.
        self.end = ""  # How its processes have ended, if it has died.
        self.progress = Progress()
        self.messages = 0  # Of its processes: steps with tokens and steps without, as of a long prompt.
        self.work = 0  # The tokens that its requests are expected to have.
        self.chosen = 0  # The larger, the later it was last chosen.
        self.cached_tokens = 0  # The size of its prefix cache.

    @property
    def runs(self) -> bool:
        """True from the time when the model is loaded until the copy dies or ends."""
        return self.client is not None and self.state is not CopyState.DEAD

    @property
    def is_expected(self) -> bool:
        """True if it is being started, or will be."""
        return self.state is CopyState.STARTING or (self.state is CopyState.DEAD and not self.given_up)


class _Messages:
    """The queue into which vLLM's client of a copy puts messages and errors."""

    def __init__(self, copy: Copy, client: CopiesClient, died: Callable[[Copy], None]) -> None:
        self._copy, self._client, self._died = copy, client, died
        # The number of the engine in vLLM's metrics. None: vLLM's own, as of a data-parallel rank.
        self._engine = copy.number - 1 or None

    def put_nowait(self, message: Any) -> None:
        if isinstance(message, Exception):
            self._died(self._copy)
            return
        if self._copy.state is CopyState.DEAD:
            return  # Its requests continue on other copies.
        if message.outputs and message.outputs[0].finish_reason == FinishReason.ABORT:
            # A process that was asked to end aborts all sequences: if a data-parallel rank dies, vLLM asks the others.
            # Of a sequence that the server aborts, no message comes. The message would end the sequences, and no error
            # would say that the copy is gone.
            return
        if self._engine is not None:
            message.engine_index = self._engine
        self._copy.messages += 1
        self._client.came += 1
        self._client.messages.put_nowait(message)


class Placed(NamedTuple):
    """The copy that has a request, and the work that the request is counted as."""

    copy: Copy
    work: int
    comes_in_parts: bool  # The prompt. Each part is a request with the same id.


class CopiesClient(AsyncMPClient):  # type: ignore[misc]
    """The client of all copies, for `AsyncLLM.engine_core`."""

    def __init__(self, siblings: Callable[[str], Sequence[str]], holds: Callable[[], bool]) -> None:
        """Create the client. It has no copies yet.

        Args:
            siblings: Returns the ids of all sequences of a request.
            holds: Returns True if a request waits when no copy can take it. False: it gets an error.
        """
        # The constructor of `AsyncMPClient` would start processes.
        self._siblings, self.holds = siblings, holds
        self.messages: asyncio.Queue[Any] = asyncio.Queue()  # That vLLM's output loop has not taken.
        self.came = 0  # Messages of all copies.
        self._handled = 0  # Messages that vLLM's output loop has handled, or that were dropped.
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # For so many to be handled.
        self._choice = CopyChoice()
        self._chosen = 0  # Requests that have got a copy.
        self.resources = SimpleNamespace(engine_dead=False)  # vLLM looks there.
        self._running: list[Copy] = []  # The copies whose processes run.
        self.ready: list[Copy] = []  # The copies that take new requests.
        self._queries: OrderedDict[str, Copy] = OrderedDict()  # The copies that keep the vectors of queries.
        self.placed: dict[str, Placed] = {}  # The requests that copies have, by their ids.

    def add(self, copy: Copy, died: Callable[[Copy], None]) -> None:
        """Add a copy that has been loaded. It takes no requests yet, apart from requests to this copy alone.

        Args:
            copy: The copy.
            died: Is called when its processes have died.
        """
        assert copy.client is not None, "it is loaded"
        core_client.read_messages(copy.client, _Messages(copy, self, died))
        copy.cached_tokens = core_client.cache_tokens(copy.client)
        self._running.append(copy)
        self.resources.engine_dead = False

    def open(self, copy: Copy) -> None:
        """Give new requests to a copy."""
        self.ready.append(copy)

    def close(self, copy: Copy) -> None:
        """Give no new requests to a copy."""
        if copy in self.ready:
            self.ready.remove(copy)

    def remove(self, copy: Copy) -> list[str]:
        """Remove a copy that has died or ended.

        Returns:
            The ids of its requests, which no copy has now.
        """
        self.close(copy)
        if copy in self._running:
            self._running.remove(copy)
        self.resources.engine_dead = not self._running
        self._choice.forget(copy.number)
        lost = [request_id for request_id, placed in self.placed.items() if placed.copy is copy]
        for request_id in lost:
            del self.placed[request_id]
        copy.work = 0
        if copy.client is not None:
            core_client.fail_utilities(copy.client)
        return lost

    def forget(self, request_ids: Iterable[str]) -> None:
        """Count requests as ended."""
        for request_id in request_ids:
            if (placed := self.placed.pop(request_id, None)) is not None:
                placed.copy.work -= placed.work

    def get_output_async(self) -> Awaitable[Any]:
        """Return the next message, to be awaited. vLLM's output loop has handled the messages that it got before."""
        self._handled = self.came - self.messages.qsize()
        if self._waiting:
            self._tell_handled()
        return self.messages.get()

    def drop_messages(self) -> None:
        """Drop the messages that have come and were not handled."""
        while not self.messages.empty():
            self.messages.get_nowait()
        self._handled = self.came
        self._tell_handled()

    def _tell_handled(self) -> None:
        """Resume the waiters whose messages have been handled."""
        waiting, self._waiting = self._waiting, []
        for came, reached in waiting:
            if came > self._handled:
                self._waiting.append((came, reached))
            elif not reached.done():
                reached.set_result(None)

    async def handled(self) -> None:
        """Wait until vLLM's output loop has handled the messages that have come: the sequences have all their tokens.

        The loop lets other tasks run within a message of many sequences.
        """
        if self._handled < self.came:
            reached = asyncio.get_running_loop().create_future()
            self._waiting.append((self.came, reached))
            await reached

    async def add_request_async(self, request: EngineCoreRequest, copy: Copy | None = None) -> None:
        """Send a request to a copy, unless a copy has it already.

        Args:
            request: The request.
            copy: The copy that gets it. None: any copy that takes new requests.

        Raises:
            EngineDeadError: No copy can take it, and it does not wait for one.
        """
        if (placed := self.placed.get(request.request_id)) is not None:
            if placed.comes_in_parts and placed.copy.client is not None:
                await placed.copy.client.add_request_async(request)
            return
        ready, work = self.ready, _work(request)
        try:
            if copy is None:
                if not ready:
                    raise EngineDeadError
                if request.pooling_params is not None and (key := core_client.query_key(request)) is not None:
                    copy = self._copy_of_query(key, request, work)
                else:
                    copy = ready[0] if len(ready) == 1 else self._choose(request, ready, work)
            assert copy.client is not None, "it has been loaded"
            self.placed[request.request_id] = Placed(copy, work, request.resumable)
            copy.work += work
            self._chosen += 1
            copy.chosen = self._chosen
            await copy.client.add_request_async(request)
        except EngineDeadError:
            if not self.holds():  # It is registered, and another copy gets it.
                raise
        except BaseException:
            self.forget([request.request_id])
            raise

    def _choose(self, request: EngineCoreRequest, ready: Sequence[Copy], work: int) -> Copy:
        for sibling in self._siblings(request.external_req_id or ""):  # They have one prompt, and die together.
            if (placed := self.placed.get(sibling)) is not None and placed.copy in ready:
                return placed.copy
        return self._choice.choose(ready, request.prompt_token_ids or (), _scope(request), work)

    def expected(self, request: EngineCoreRequest) -> tuple[int | None, int | None]:
        """Return the number of the copy that would get a request now. Nothing of the request is remembered.

        Returns:
            The number, and the tokens of the prompt that the copy's prefix cache may have. None: no copy takes
            requests. With one copy, only its process knows the tokens.
        """
        if len(self.ready) < 2:
            return next((copy.number for copy in self.ready), None), None
        token_ids = request.prompt_token_ids or ()
        copy, cached_tokens = self._choice.expected(self.ready, token_ids, _scope(request), _work(request))
        return copy.number, cached_tokens

    def _copy_of_query(self, key: str, request: EngineCoreRequest, work: int) -> Copy:
        """Return the copy that keeps the vectors of a query. Another copy would die of the query's documents.

        Raises:
            GenerationError: The copy has died.
        """
        if not core_client.is_compared_with_query(request):
            self._queries[key] = self._choose(request, self.ready, work)
            while len(self._queries) > _MOST_QUERIES:
                self._queries.popitem(last=False)
        if (copy := self._queries.get(key)) is None or not copy.runs:
            raise GenerationError("the copy that had the query of this document has died")
        return copy

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        ended: dict[Copy, list[str]] = {}
        for request_id in request_ids:
            if (placed := self.placed.pop(request_id, None)) is not None:
                placed.copy.work -= placed.work
                ended.setdefault(placed.copy, []).append(request_id)
        for copy, its_ids in ended.items():
            if copy.client is not None:
                await copy.client.abort_requests_async(its_ids)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return (await self.call_utility_all_async(method, *args))[0]

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Call a method in every copy.

        Returns:
            The results, at least one. A copy that dies before it answers has none.

        Raises:
            EngineDeadError: All copies have died.
            Exception: A copy has raised it.
        """
        clients = [copy.client for copy in self._running if copy.client is not None]
        calls = (client.call_utility_all_async(method, *args) for client in clients)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, EngineDeadError):
                raise error
        found = [
            result for results_of_copy in results if isinstance(results_of_copy, list) for result in results_of_copy
        ]
        if not found:
            raise EngineDeadError
        return found

    def shutdown(self, timeout: float | None = None) -> None:
        for copy in self._running:
            if copy.client is not None:
                copy.client.shutdown(timeout)

    def dp_engines_running(self) -> bool:
        return any(copy.client.dp_engines_running() for copy in self._running if copy.client is not None)

    def get_kv_event_sources(self) -> dict[int, Any]:
        clients = [copy.client for copy in self._running if copy.client is not None]
        return {rank: source for client in clients for rank, source in client.get_kv_event_sources().items()}


def _work(request: EngineCoreRequest) -> int:
    """Return the tokens that a request is expected to have."""
    params = request.sampling_params
    answer = (params.max_tokens or MOST_ANSWER_TOKENS) if params is not None else 0
    return len(request.prompt_token_ids or ()) + min(answer, MOST_ANSWER_TOKENS) + 1


def _scope(request: EngineCoreRequest) -> tuple[int | None, str | None]:
    """Return the scope of a request's prompt, as `CopyChoice.choose` takes it."""
    adapter = request.lora_request
    return adapter and adapter.lora_int_id, request.cache_salt
