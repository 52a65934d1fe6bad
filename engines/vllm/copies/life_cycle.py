"""The life cycle of the copies: they are loaded, opened, restarted after their death, drained and ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from vllm.v1.engine.exceptions import EngineDeadError

from engines.errors import EngineDead, InvalidRequest
from engines.interface import CopyState, EngineCopy, EngineHealth, EngineStartError
from engines.settings.engine_config import EngineConfig
from engines.statistics import EngineStatistics
from engines.vllm import async_llm
from engines.vllm.background_tasks import BackgroundTasks
from engines.vllm.copies import core_client
from engines.vllm.copies.client import CopiesClient, Copy
from engines.vllm.copies.continuation import Continuations, fail
from engines.vllm.loading import SHUTDOWN_SECONDS, StartedEngine, VllmLoader, free
from engines.vllm.lora import VllmAdapters
from engines.vllm.output import OwnState
from engines.vllm.processes import fork_server
from engines.vllm.processes.contexts import end_processes, ended_workers, worker_processes

logger = logging.getLogger(__name__)

_DIED_AT_START = "a copy of the model has died right after its start; the log has its error"


class Copies:
    """The copies of one model, which serve as one engine."""

    def __init__(
        self,
        loaded: StartedEngine,
        first: Copy,
        config: EngineConfig,
        statistics: EngineStatistics,
        waits: Callable[[], bool],
    ) -> None:
        """Create the copies. The first copy has been loaded.

        Args:
            loaded: vLLM with the first copy.
            first: The first copy.
            config: The settings of the model.
            statistics: Counts the continued requests, and the seconds in which no copy accepted requests.
            waits: Returns whether requests wait when no copy runs. If not, they get an error.
        """
        self._llm, self._places, self._config = loaded.llm, loaded.places, config
        self._reports, self._statistics, self._waits = loaded.reports, statistics, waits
        self._by_number = {1: first}
        self._most = len(self._places[: config.max_copies])
        self._least = min(config.min_copies or self._most, self._most)
        self._sends_whole_media = self._most > 1
        # This event is set while a copy accepts new requests. It is also set when no copy will ever accept requests
        # again. The waiting requests of dead copies are sent before the event is set.
        self.up = asyncio.Event()
        self._down_since = 0.0
        self.gave_up = False  # True if no copy runs and no copy will be started.
        # Limits the number of copies that are loaded at the same time.
        self._turns = asyncio.Semaphore(len(self._places) if config.parallel_loading else 1)
        self._openings: dict[Copy, asyncio.Task[None]] = {}
        self._ends: dict[int, asyncio.Task[None]] = {}  # The tasks that end former copies and free their memory.
        self._tasks = BackgroundTasks(_log_error)
        self._adapters: VllmAdapters | None = None
        self._continuations: Continuations | None = None  # None until the first copy takes requests.
        first.client, first.place = self._llm.engine_core, self._places[0]
        first.workers = worker_processes(first.client)
        first.elsewhere = (*loaded.elsewhere, *core_client.engines_elsewhere(first.client))
        self.client = CopiesClient(partial(async_llm.sequence_ids, self._llm), waits)
        async_llm.begin_output(self._llm, self.client, self._reports, statistics)
        self.client.add(first, self._died)

    def begin(self, adapters: VllmAdapters | None) -> None:
        """Let the first copy accept requests.

        Raises:
            EngineStartError: The copy has died.
        """
        self._adapters = adapters
        deaths = self._config.continue_calls
        self._continuations = Continuations(self._llm, self.client, self._statistics, adapters, deaths)
        if (first := self._by_number[1]).state is CopyState.DEAD:
            raise EngineStartError(_DIED_AT_START)
        self._serve(first)

    async def start_others(self) -> None:
        """Load the other copies. Return when the minimum number serves, and load the rest in the background.

        Raises:
            EngineStartError: A copy cannot be loaded.
        """
        started = await self._start_all(range(2, self._least + 1))
        openings = (self._openings[copy] for copy in started if copy in self._openings)
        await asyncio.gather(*openings, return_exceptions=True)  # If a copy dies, its opening is cancelled.
        if any(copy.state is CopyState.DEAD for copy in started):
            raise EngineStartError(_DIED_AT_START)
        self._add(range(self._least + 1, self._most + 1))

    # Figures and commands

    @property
    def sequences(self) -> int:
        """The maximum number of sequences that run at the same time, in all copies together."""
        config = self._llm.vllm_config
        return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size * self._most)

    @property
    def listed(self) -> Sequence[EngineCopy]:
        """The copies, sorted by number."""
        copies, faulty = sorted(self._by_number.values(), key=lambda copy: copy.number), self._faulty
        return [
            EngineCopy(c.number, c.state, c.started_at, c.place.gpus, c.end, c.elsewhere, c in faulty) for c in copies
        ]

    @property
    def _faulty(self) -> list[Copy]:
        """The copies that `restart` restarts: the dead copies, or the stalled copies if no copy is dead."""
        copies = self._by_number.values()
        dead = [copy for copy in copies if copy.state is CopyState.DEAD and not copy.given_up]
        return dead or [copy for copy in self.running if copy.stalled and copy.state is not CopyState.DRAINING]

    @property
    def running(self) -> Sequence[Copy]:
        """The copies whose processes run."""
        return [copy for copy in self._by_number.values() if copy.runs]

    def health(self) -> EngineHealth:
        """Return the health of all copies together. They are alive if at least one copy runs."""
        # Whether the quietest copy is stalled, and its quiet seconds. A stalled copy counts as quieter than all others.
        longest = False, -1.0
        stalled: list[str] = []
        dead: list[Copy] = []
        left = 0  # The number of copies that serve or will serve.
        for copy in self._by_number.values():  # A single loop, because this is called often.
            if copy.state is CopyState.DEAD:
                dead.append(copy)
                continue
            serves = copy.state is not CopyState.DRAINING
            left += serves
            if copy.client is not None:
                quiet_seconds = copy.progress.quiet_seconds  # Usually 0. The next condition is then cheap.
                if is_stalled := quiet_seconds > 0 and serves and copy.stalled:
                    stalled.append(str(copy.number))
                longest = max(longest, (is_stalled, quiet_seconds))
        if longest[1] < 0:  # No copy runs.
            return EngineHealth(False, "the engine has died")
        missing = lost = what = ""
        count = len(self._by_number)
        if stalled:
            what = f"copy {', '.join(stalled)} of {count}" if count > 1 else "the engine"
        if dead:
            restarting = [str(copy.number) for copy in dead if not copy.given_up]
            missing = f"copy {', '.join(restarting)} of {count} has died" if restarting else ""
            if len(restarting) < len(dead) and left < self._least:
                lost = f"{left} of {count} copies are left, and {self._least} are to serve"
        return EngineHealth(
            alive=True,
            quiet_seconds=longest[1],
            stalled=what,
            ready_copies=len(self.client.ready),
            missing=missing,
            lost=lost,
        )

    def look(self) -> None:
        """Handle deaths that vLLM has not reported, record signs of life, and end copies that have drained."""
        if async_llm.output_has_failed(self._llm) and not self.gave_up:
            for copy in self.running:  # Tokens of any request may be lost, so later tokens must not be used.
                self._died(copy)
            self.client.drop_messages()
            async_llm.run_output(self._llm)
        states, placed = async_llm.request_states(self._llm), self.client.placed
        if len(placed) > len(states):
            self.client.forget([known for known in placed if known not in states])
        for copy in tuple(self._by_number.values()):
            if copy.client is None or copy.state is CopyState.DEAD:
                continue
            if core_client.is_dead(copy.client):
                self._died(copy)
                continue
            copy.progress.look(copy.work > 0, copy.messages)
            if copy.state is CopyState.DRAINING and not copy.work and copy not in self._openings:
                logger.info("copy %d has drained", copy.number)
                del self._by_number[copy.number]
                self._remove(copy)
            elif copy.state is CopyState.DRAINING and copy.stalled and self._waits() and self.client.ready:
                self._died(copy)  # `restart` skips it. Its requests go to other copies.
        if self._continuations is not None and not any(copy.is_expected for copy in self._by_number.values()):
            self._continuations.fail_suspects()

    async def restart(self) -> None:
        """Restart the dead copies. If no copy is dead, restart the stalled copies.

        Raises:
            EngineStartError: A copy cannot be started.
        """
        faulty = self._faulty
        for copy in faulty:
            self._died(copy)
        fork_server.start()
        await self._start_all([copy.number for copy in faulty])

    def give_up(self) -> None:
        """Never restart the copies that are dead now. If no other copy is left, waiting requests get an error."""
        for copy in self._by_number.values():
            copy.given_up |= copy.state is CopyState.DEAD
        self._end_if_all_are_dead()

    def _end_if_all_are_dead(self) -> None:
        """Give an error to all requests if no copy serves and no copy will be started."""
        if all(copy.given_up for copy in self._by_number.values()):
            self.gave_up = True
            self.fail_all(EngineDead())
            self.up.set()

    def scale(self, least: int, most: int) -> None:
        """Begin to add or to remove copies. See `Engine.scale`."""
        if most > len(self._places):
            raise InvalidRequest(f"there is room for {len(self._places)} copies at most")
        if most > 1 and not self._sends_whole_media and self._llm.renderer.mm_processor is not None:
            raise InvalidRequest(
                "a model that takes media may have further copies if it has started with two or more, and now has one"
            )
        self._least, self._most = min(least, most), most
        for copy in [copy for copy in self._by_number.values() if copy.given_up]:
            del self._by_number[copy.number]  # If there are too few copies, a new copy takes its place.
        copies = [copy for copy in self._by_number.values() if copy.state is not CopyState.DRAINING]
        useful = {CopyState.READY: 0, CopyState.STARTING: 1, CopyState.DEAD: 2}
        copies.sort(key=lambda copy: (useful[copy.state], copy.stalled, copy.number))
        for copy in copies[most:]:
            if copy.state is CopyState.DEAD:
                del self._by_number[copy.number]
            else:  # It ends when its last request has ended.
                copy.state = CopyState.DRAINING
                self.client.close(copy)
        kept = copies[:most]
        draining = [copy for copy in self._by_number.values() if copy.state is CopyState.DRAINING]
        for copy in draining[: most - len(kept)]:
            kept.append(copy)
            if copy.client is None or copy in self._openings:
                copy.state = CopyState.STARTING
            else:
                self._serve(copy)
        free = [number for number in range(1, len(self._places) + 1) if number not in self._by_number]
        self._add(free[: most - len(kept)])

    async def stop(self, error: EngineDead) -> None:
        """End all copies. Their requests get an error."""
        cancelled = self._tasks.difference(self._ends.values())
        for task in cancelled:
            task.cancel()
        self.fail_all(error)
        self.up.set()
        for copy in self._by_number.values():
            if copy.state is not CopyState.DEAD:
                self._remove(copy)
        # Errors are already logged. Loads that were cancelled kill their processes.
        await asyncio.gather(*cancelled, *self._ends.values(), return_exceptions=True)
        await async_llm.end_output(self._llm)
        await asyncio.to_thread(free, self._llm)

    def fail_all(self, error: EngineDead) -> None:
        for state in async_llm.request_states(self._llm).values():
            if isinstance(state, OwnState):
                state.fail(error)
        async_llm.fail_all(self._llm, error.message)  # Requests of vLLM's front end.

    # Steps in the life of one copy

    def _add(self, numbers: Sequence[int]) -> None:
        """Begin to load copies. A copy that cannot be loaded counts as dead, so that it is restarted."""
        if numbers:
            fork_server.start()
            self._tasks.begin(self._add_all(numbers))

    async def _add_all(self, numbers: Sequence[int]) -> None:
        try:
            await self._start_all(numbers)
        except EngineStartError as error:
            logger.error("a copy of the model cannot be loaded: %s", error)

    async def _start_all(self, numbers: Iterable[int]) -> list[Copy]:
        """Load copies: all at once with `option.parallel_loading`, otherwise one by one.

        Raises:
            EngineStartError: A copy cannot be loaded. The others are loaded before this error is raised.
        """
        copies = []
        for number in numbers:
            self._by_number[number] = copy = Copy(number, self._places[number - 1], self._config.stall_timeout)
            copies.append(copy)
        results = asyncio.gather(*map(self._start, copies), return_exceptions=True)
        errors = [error for error in await results if isinstance(error, BaseException)]
        del results  # Otherwise the error and this frame would form a reference cycle that keeps vLLM's client.
        if errors:
            raise errors.pop(0)
        return copies

    async def _start(self, copy: Copy) -> None:
        """Load a copy, and begin to open it.

        Raises:
            EngineStartError: The copy cannot be loaded. It then counts as dead.
        """
        try:
            async with self._turns:
                if (former := self._ends.get(copy.number)) is not None:
                    await asyncio.wait([former])
                started = time.monotonic()
                loader = VllmLoader(self._config, copy.threads)
                copy.client = await loader.load_copy(self._llm, copy.place)
                copy.workers = worker_processes(copy.client)
                copy.elsewhere = (*loader.elsewhere, *core_client.engines_elsewhere(copy.client))
        except BaseException:
            if copy.state is CopyState.DRAINING:
                del self._by_number[copy.number]
            copy.state = CopyState.DEAD
            copy.threads.end()
            raise
        logger.info("copy %d of the model is loaded after %.1f s", copy.number, time.monotonic() - started)
        self._reports.add_engine(copy.number - 1)
        self.client.add(copy, self._died)
        self._openings[copy] = self._tasks.begin(self._open(copy))

    async def _open(self, copy: Copy) -> None:
        """Load the adapters into a copy, send the waiting requests to it, and let it accept new requests."""
        assert copy.client is not None, "it is loaded"
        assert self._continuations is not None, "the first copy takes requests"
        try:
            if self._adapters is not None:
                await self._adapters.load_into(copy.client.add_lora_async, is_only=not self.client.ready)
            if not self._sends_whole_media and self._llm.renderer.mm_processor is not None:
                await self._llm.reset_mm_cache()  # The new process has no media.
            await self._continuations.send_to(copy)
        except (EngineDeadError, EngineDead):
            return  # `_died` handles the death.
        except Exception:
            logger.exception("copy %d cannot be opened: internal error", copy.number)
            self._died(copy)
            copy.given_up = True
            self._end_if_all_are_dead()
            return
        finally:
            if self._openings.get(copy) is asyncio.current_task():
                del self._openings[copy]
        if copy.state is CopyState.STARTING:
            self._serve(copy)
            await self._continuations.send_on()  # Send requests that arrived during `send_to`.

    def _serve(self, copy: Copy) -> None:
        """Let a copy accept new requests."""
        copy.state = CopyState.READY
        self.client.open(copy)
        if self._down_since:
            seconds, self._down_since = time.monotonic() - self._down_since, 0.0
            self._statistics.down_seconds += seconds
            logger.info("the engine takes requests again after %.1f s", seconds)
        self.up.set()

    def _died(self, copy: Copy) -> None:
        """Handle the death of a copy, once. Its requests go to other copies, or wait for the next copy."""
        if not copy.runs:
            return
        was_draining, copy.state = copy.state is CopyState.DRAINING, CopyState.DEAD
        if (opening := self._openings.pop(copy, None)) is not None:
            opening.cancel()
        assert copy.client is not None, "it runs"
        ends = core_client.end_of_processes(copy.client), ended_workers(copy.workers)
        copy.end = "; ".join(filter(None, ends))
        lost = self._remove(copy)
        logger.error("copy %d of the model has died with %d requests: %s", copy.number, len(lost), copy.end)
        if was_draining:
            del self._by_number[copy.number]
        if self._continuations is None or not self._waits():
            states = async_llm.request_states(self._llm)
            for state in [states[known] for known in lost if known in states]:
                fail(state)
            self.gave_up |= all(other.state is CopyState.DEAD for other in self._by_number.values())
            return
        self._continuations.copy_died(copy, lost)
        if self.client.ready:
            self._tasks.begin(self._continuations.send_on())
        elif self.up.is_set():
            self.up.clear()
            self._down_since = time.monotonic()
        if not self._sends_whole_media and self._llm.renderer.mm_processor is not None:
            # New prompts wait for the new process, which has no media.
            self._tasks.begin(self._llm.renderer.clear_mm_cache_async())

    def _remove(self, copy: Copy) -> list[str]:
        """Begin to end the processes of a copy. Return the ids of the copy's requests."""
        copy.state = CopyState.DEAD
        lost = self.client.remove(copy)
        self._ends[copy.number] = self._tasks.begin(self._end(copy))
        return lost

    async def _end(self, copy: Copy) -> None:
        """End the processes of a copy, and free its client and its threads."""
        client, copy.client = copy.client, None
        try:
            if client is not None:
                await asyncio.to_thread(end_processes, client, SHUTDOWN_SECONDS)
                core_client.let_go(client)
        finally:
            copy.threads.end()
            # The copy's last messages have been handled by now.
            replicas = self._llm.vllm_config.parallel_config.data_parallel_size
            self._reports.engine_died(range(copy.number - 1, copy.number - 1 + replicas))


def _log_error(error: BaseException) -> None:
    logger.error("a copy of the model: internal error", exc_info=error)
