"""The server's side of `grammar_trial`: asks that process about constraints, and starts it anew where one ended it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import struct
import sys
from collections import OrderedDict
from typing import Any

from handlers.engines import grammar_trial
from handlers.errors import GenerationFailed

logger = logging.getLogger(__name__)

_START_SECONDS, _ANSWER_SECONDS = 60.0, 20.0
"""By the clock, where a busy machine may give it little time; its processor time has a limit of its own."""
_REMEMBERED = 1024
_LENGTH = struct.Struct(">I")

TOO_MUCH = "it takes too much time or memory to compile"


class GrammarTrials:
    """Finds out whether constraints can be compiled. The process is started with the first of them."""

    def __init__(self, tokenizer: str, vocabulary_size: int, eos_token_id: int | None) -> None:
        """`tokenizer`: as `tokenizers` writes it, JSON."""
        self._first = {"tokenizer": tokenizer, "vocabulary_size": vocabulary_size, "eos": eos_token_id}
        self._process: asyncio.subprocess.Process | None = None
        self._one_asks = asyncio.Lock()
        self._asked: dict[bytes, asyncio.Task[str | None]] = {}
        self._known: OrderedDict[bytes, str | None] = OrderedDict()

    async def error(self, kind: str, text: str) -> str | None:
        """What is wrong with a constraint, as the end of a sentence; None: nothing was found.

        Raises:
            GenerationFailed: the process cannot be started.
        """
        key = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._ask(key, {"kind": kind, "text": text}))
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        # A client that leaves must not leave half an exchange behind.
        return await asyncio.shield(task)

    async def _ask(self, key: bytes, message: dict[str, str]) -> str | None:
        async with self._one_asks:
            process = await self._started()
            try:
                answer = await asyncio.wait_for(_exchange(process, message), _ANSWER_SECONDS)
            except TimeoutError:
                await self.stop()
                return TOO_MUCH
            except (OSError, asyncio.IncompleteReadError):
                await self.stop()
                logger.warning(
                    "a constraint ended the process that compiles it first (%s); it is refused", process.returncode
                )
                answer = {"error": TOO_MUCH}
        error: str | None = answer["error"]
        self._known[key] = error
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return error

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None:
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
