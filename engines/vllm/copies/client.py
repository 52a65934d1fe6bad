"""One client for the processes of all copies. vLLM's `AsyncLLM` uses it like the client of a single engine.

vLLM has a client for the processes of one engine, and each copy has such a client. The client in this module sends each
request to one copy, puts the messages of all copies into one queue, and calls methods such as `add_lora` on every copy.
So vLLM's front end and Slipway's requests share one output loop, one list of sequences and one tokenizer.
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
_MOST_QUERIES = 4096  # For at most this many queries, the client remembers the copy that has the query's vectors.


class Copy:
    """The processes of a copy, from their start to their end. A restarted copy is a new object with the same number."""

    def __init__(self, number: int, place: Place = _ANYWHERE, stall_timeout: float | None = None) -> None:
        self.number, self.place = number, place
        self.state = CopyState.STARTING
        self.started_at = time.time()
        self.threads = LastingThreads(f"copy {number}")  # They start the processes, and the processes end with them.
        self.client: AsyncMPClient | None = None  # None until the model is loaded.
        self.workers: Mapping[psutil.Process, str] = {}  # The workers and their titles, at the end of loading.
        # Descriptions of the engines and workers that are not processes of this server.
        self.elsewhere: Sequence[str] = ()
        self.given_up = False  # Whether the copy has died and will not be restarted.
        self.end = ""  # How the processes have ended, if the copy has died.
        self.progress = Progress(stall_timeout)
        self.messages = 0  # The number of messages from the processes. Steps of a long prompt also send messages.
        self.work = 0  # The number of tokens that the copy's requests are expected to have.
        self.chosen = 0  # The larger the number, the more recently the copy was chosen.
        self.cached_tokens = 0  # The size of the prefix cache, in tokens.

    @property
    def runs(self) -> bool:
        """True after the model is loaded, until the copy dies or ends."""
        return self.client is not None and self.state is not CopyState.DEAD

    @property
    def stalled(self) -> bool:
        return self.progress.is_stalled

    @property
    def is_expected(self) -> bool:
        """True if the copy is starting or will be restarted."""
        return self.state is CopyState.STARTING or (self.state is CopyState.DEAD and not self.given_up)


class _Messages:
    """The queue into which a copy's vLLM client puts messages and errors."""

    def __init__(self, copy: Copy, client: CopiesClient, died: Callable[[Copy], None]) -> None:
        self._copy, self._client, self._died = copy, client, died
        # The index of the engine in vLLM's metrics. None for the first copy: its messages keep vLLM's own index, for
        # example a data-parallel rank.
        self._engine = copy.number - 1 or None

    def put_nowait(self, message: Any) -> None:
        if isinstance(message, Exception):
            self._died(self._copy)
            return
        if self._copy.state is CopyState.DEAD:
            return  # Its requests continue on other copies.
        if message.outputs and message.outputs[0].finish_reason == FinishReason.ABORT:
            # A process that is told to end, for example because another data-parallel rank has died, aborts all its
            # sequences with this message. It would end them without an error, although the copy has died. If the server
            # aborts a sequence, the process sends no such message.
            return
        if self._engine is not None:
            message.engine_index = self._engine
        self._copy.messages += 1
        self._client.came += 1
        self._client.messages.put_nowait(message)


class Placed(NamedTuple):
    """The copy that has a request, and the work that the request counts as."""

    copy: Copy
    work: int
    comes_in_parts: bool  # Whether the prompt comes in parts. Each part is a request with the same id.


class CopiesClient(AsyncMPClient):  # type: ignore[misc]
    """The client of all copies. It is the `engine_core` of vLLM's `AsyncLLM`."""

    def __init__(self, siblings: Callable[[str], Sequence[str]], holds: Callable[[], bool]) -> None:
        """Create the client. It has no copies yet.

        Args:
            siblings: Returns the ids of all sequences of a request.
            holds: Returns whether requests wait when no copy can accept them. If not, they get an error.
        """
        # The constructor of `AsyncMPClient` would start processes.
        self._siblings, self.holds = siblings, holds
        self.messages: asyncio.Queue[Any] = asyncio.Queue()  # Messages that vLLM's output loop has not read.
        self.came = 0  # The number of messages that have arrived from all copies.
        self._handled = 0  # The number of messages that vLLM's output loop has handled, or that were dropped.
        # The waiting tasks, each with the number of messages that must be handled first.
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._choice = CopyChoice()
        self._chosen = 0  # The number of requests that were sent to a copy.
        self.resources = SimpleNamespace(engine_dead=False)  # vLLM reads `engine_dead`.
        self._running: dict[Copy, AsyncMPClient] = {}  # The clients of the copies whose processes run.
        self.ready: list[Copy] = []  # The copies that accept new requests.
        self._queries: OrderedDict[str, Copy] = OrderedDict()  # For each query: the copy that keeps its vectors.
        self.placed: dict[str, Placed] = {}  # For each request id: the copy of the engine that has the request.

    def add(self, copy: Copy, died: Callable[[Copy], None]) -> None:
        """Add a copy that has been loaded.

        Until `open` is called, the copy gets only the requests for which `add_request_async` has this `copy`.

        Args:
            copy: The copy.
            died: Called when the copy's processes have died.
        """
        assert copy.client is not None, "it is loaded"
        core_client.read_messages(copy.client, _Messages(copy, self, died))
        copy.cached_tokens = core_client.cache_tokens(copy.client)
        self._running[copy] = copy.client
        self.resources.engine_dead = False

    def open(self, copy: Copy) -> None:
        """Begin to send new requests to a copy."""
        self.ready.append(copy)

    def close(self, copy: Copy) -> None:
        """Stop sending new requests to a copy."""
        if copy in self.ready:
            self.ready.remove(copy)

    def remove(self, copy: Copy) -> list[str]:
        """Remove a copy that has died or ended.

        Returns:
            The ids of the copy's requests, which now have no copy.
        """
        self.close(copy)
        self._running.pop(copy, None)
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
        """Return an awaitable for the next message.

        vLLM's output loop calls this method after it has handled all earlier messages.
        """
        self._handled = self.came - self.messages.qsize()
        if self._waiting:
            self._tell_handled()
        return self.messages.get()

    def drop_messages(self) -> None:
        """Drop all messages that were not handled."""
        while not self.messages.empty():
            self.messages.get_nowait()
        self._handled = self.came
        self._tell_handled()

    def _tell_handled(self) -> None:
        """Resume each waiter if all messages that had arrived before its wait have been handled or dropped."""
        waiting, self._waiting = self._waiting, []
        for came, reached in waiting:
            if came > self._handled:
                self._waiting.append((came, reached))
            elif not reached.done():
                reached.set_result(None)

    async def handled(self) -> None:
        """Wait until vLLM's output loop has handled all messages that have arrived, so that no token is missing.

        Without the wait, the loop may be in the middle of a message: it lets other tasks run between the sequences of a
        large message.
        """
        if self._handled < self.came:
            reached = asyncio.get_running_loop().create_future()
            self._waiting.append((self.came, reached))
            await reached

    async def add_request_async(self, request: EngineCoreRequest, copy: Copy | None = None) -> None:
        """Send a request to a copy. If a copy already has the request, send it only further parts of its prompt.

        Args:
            request: The request.
            copy: The copy that gets the request. None: any copy that accepts new requests.

        Raises:
            EngineDeadError: No copy can accept the request, and requests do not wait for a copy.
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
            if not self.holds():  # Otherwise the registered request waits, and another copy gets it.
                raise
        except BaseException:
            self.forget([request.request_id])
            raise

    def _choose(self, request: EngineCoreRequest, ready: Sequence[Copy], work: int) -> Copy:
        for sibling in self._siblings(request.external_req_id or ""):  # They have the same prompt.
            if (placed := self.placed.get(sibling)) is not None and placed.copy in ready:
                return placed.copy
        return self._choice.choose(ready, request.prompt_token_ids or (), _scope(request), work)

    def expected(self, request: EngineCoreRequest) -> tuple[int | None, int | None]:
        """Return which copy would get a request now, without recording the request.

        Returns:
            The number of the copy, and how many prompt tokens its prefix cache may hold. The first is None if no copy
            accepts requests. The second is None if fewer than two copies accept requests, because the server then does
            not track the prefix cache.
        """
        if len(self.ready) < 2:
            return next((copy.number for copy in self.ready), None), None
        token_ids = request.prompt_token_ids or ()
        copy, cached_tokens = self._choice.expected(self.ready, token_ids, _scope(request), _work(request))
        return copy.number, cached_tokens

    def _copy_of_query(self, key: str, request: EngineCoreRequest, work: int) -> Copy:
        """Return the copy that keeps the vectors of a query. The query's documents would crash any other copy.

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
            The results, at least one. A copy that dies before it answers has no result.

        Raises:
            EngineDeadError: All copies have died.
            Exception: The method has raised it in a copy.
        """
        calls = (client.call_utility_all_async(method, *args) for client in self._running.values())
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
        for client in self._running.values():
            client.shutdown(timeout)

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {
            rank: source for client in self._running.values() for rank, source in client.get_kv_event_sources().items()
        }


def _work(request: EngineCoreRequest) -> int:
    """Return the number of tokens that a request is expected to have."""
    params = request.sampling_params
    answer = (params.max_tokens or MOST_ANSWER_TOKENS) if params is not None else 0
    return len(request.prompt_token_ids or ()) + min(answer, MOST_ANSWER_TOKENS) + 1


def _scope(request: EngineCoreRequest) -> tuple[int | None, str | None]:
    """Return the scope of a request's prompt for `CopyChoice.choose`."""
    adapter = request.lora_request
    return adapter and adapter.lora_int_id, request.cache_salt
