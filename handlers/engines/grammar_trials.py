"""The server's side of `grammar_trial`: asks such processes about constraints, and starts one anew where it was ended.

One constraint may take a process for seconds, so there are two of them, few constraints wait, and none waits for long:
whoever sends expensive ones gets refusals, and others their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import struct
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from handlers.engines import grammar_trial
from handlers.errors import EngineDead, GenerationFailed, Overloaded

logger = logging.getLogger(__name__)

PROCESSES = 2
MOST_WAITING = 64
"""Constraints that are asked about and have no process yet; further ones are refused at once."""
WAIT_SECONDS = 20.0
"""For a process, after which a constraint is refused."""
_START_SECONDS, _ANSWER_SECONDS = 60.0, 20.0
"""By the clock, where a busy machine may give it little time; its processor time has a limit of its own."""
_REMEMBERED = 1024
_LENGTH = struct.Struct(">I")

TOO_MUCH = "it takes too much time or memory to compile"


@dataclass(slots=True, eq=False)
class _Question:
    """A constraint that is asked about, by one client or several at a time."""

    clients: int = 0
    begun: bool = False
    """A process has it, which must not be left with half an exchange."""
    answer: asyncio.Task[str | None] = field(init=False)


class GrammarTrials:
    """Finds out whether constraints can be compiled. Processes are started as they are needed."""

    def __init__(self, tokenizer: str, vocabulary_size: int, eos_token_id: int | None) -> None:
        """`tokenizer`: as `tokenizers` writes it, JSON."""
        first = {"tokenizer": tokenizer, "vocabulary_size": vocabulary_size, "eos": eos_token_id}
        self._processes = [_Process(first) for _ in range(PROCESSES)]
        self._idle = list(reversed(self._processes))
        self._one_each = asyncio.Semaphore(PROCESSES)
        self._asked: dict[bytes, _Question] = {}
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._stopped = False

    async def error(self, kind: str, text: str) -> str | None:
        """What is wrong with a constraint, as the end of a sentence; None: nothing was found.

        Raises:
            GenerationFailed: no process can be started.
            Overloaded: too many constraints wait, or this one has waited for too long.
            EngineDead: the engine is being stopped.
        """
        key = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        question = self._asked.get(key) or self._ask(key, {"kind": kind, "text": text})
        question.clients += 1
        try:
            return await asyncio.shield(question.answer)
        except asyncio.CancelledError:
            if self._stopped:
                raise EngineDead("the server is stopping; the request was not completed") from None
            raise
        finally:
            question.clients -= 1
            if not question.clients and not question.begun:  # all who asked have gone
                self._forget(key, question)
                question.answer.cancel()

    def _ask(self, key: bytes, message: dict[str, str]) -> _Question:
        if self._stopped:
            raise EngineDead("the server is stopping; the request was not completed")
        if len(self._asked) >= PROCESSES + MOST_WAITING:
            raise Overloaded(f"{len(self._asked)} constraints wait to be compiled; try again later")
        question = self._asked[key] = _Question()
        question.answer = asyncio.create_task(self._answer(key, question, message))
        question.answer.add_done_callback(lambda _: self._forget(key, question))
        return question

    def _forget(self, key: bytes, question: _Question) -> None:
        if self._asked.get(key) is question:
            del self._asked[key]

    async def _answer(self, key: bytes, question: _Question, message: dict[str, str]) -> str | None:
        try:
            await asyncio.wait_for(self._one_each.acquire(), WAIT_SECONDS)
        except TimeoutError:
            raise Overloaded(f"the constraint has waited {WAIT_SECONDS:g} s to be compiled; try again later") from None
        question.begun = True
        process = self._idle.pop()  # one that runs already, if there is one
        try:
            error = await process.error(message)
        finally:
            self._idle.append(process)
            self._one_each.release()
        self._known[key] = error
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return error

    async def stop(self) -> None:
        """End the processes. Whoever waits for an answer is told that the engine is gone."""
        self._stopped = True
        answers = [question.answer for question in self._asked.values()]
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes))


class _Process:
    """One process that compiles constraints, started with the first of them."""

    def __init__(self, first: dict[str, Any]) -> None:
        self._first = first
        self._process: asyncio.subprocess.Process | None = None

    async def error(self, message: dict[str, str]) -> str | None:
        """As `GrammarTrials.error`; one caller at a time."""
        process = await self._started()
        try:
            answer = await asyncio.wait_for(_exchange(process, message), _ANSWER_SECONDS)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            await self.stop()
            logger.warning(
                "a constraint ended the process that compiles it first (%s); it is refused", process.returncode
            )
            return TOO_MUCH
        error: str | None = answer["error"]
        return error

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:  # else it was killed while it was idle
            return self._process
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", grammar_trial.__file__),  # -P: its folder has modules named like packages
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            await asyncio.wait_for(_exchange(process, self._first), _START_SECONDS)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            await self.stop()
            logger.exception("the process that compiles constraints cannot be started")
            raise GenerationFailed("constraints cannot be compiled at present") from error
        return process

    async def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, message: Any) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    data = json.dumps(message).encode()
    process.stdin.write(_LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return json.loads(await process.stdout.readexactly(length))
