"""Runs the process that tests constraints and checks answers, and caches its results.

A constraint is a program that a client has sent. So a separate process (`trial_process`) rewrites and compiles it
before the engine gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple, TypeVar

import msgspec
from tokenizers import Tokenizer

from engines.errors import EngineDead, GenerationFailed, Overloaded
from engines.vllm.constraints import trial_process
from engines.vllm.constraints.trial_process import TOO_MUCH, Trial

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# A request is refused if the trial of its constraint takes longer than this, including the wait for earlier trials.
WAIT_SECONDS = 60.0
# The limits of elapsed time for the start of the process, and for one constraint. The process itself limits processor
# time. The limits of elapsed time are longer, because a process gets little processor time on a busy machine.
START_SECONDS, CLOCK_SECONDS = 60.0, 20.0
_REMEMBERED, _REMEMBERED_CHARACTERS = 1024, 1 << 24
# The maximum number of answers that wait for their check, and the maximum length of an answer. Further answers and
# longer answers are not checked.
_WAITING_ANSWERS, _ANSWER_CHARACTERS = 64, 1 << 18
NO_VERDICT = "the constraint could not be compiled; try again later"
# The exit codes of the process if a constraint exceeds the processor time, the memory or the stack: the negative
# numbers of the signals that end the process.
_VERDICTS = {-number for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)}
_STOPPING = "the server is stopping; the request was not completed"


class _Answer(NamedTuple):
    """A finished answer that waits for its check."""

    schema: str
    text: str
    tell: Callable[[str], None]


class GrammarTrials:
    """Tests constraints one by one in a separate process, which is started for the first constraint.

    Results are cached. The process also checks answers. A trial waits for at most one check.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary_size: int, eos_token_id: int | None, *, drafts: bool = False
    ) -> None:
        plain = json.loads(tokenizer.to_str()) | {"padding": None, "truncation": None}  # llguidance supports neither.
        self._first = {
            "tokenizer": json.dumps(plain),
            "vocabulary_size": vocabulary_size,
            "eos": eos_token_id,
            "drafts": drafts,
        }
        self._process: Popen[str] | None = None
        # This thread starts the process and waits for its answers. The kernel kills the process when the thread ends.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._known: dict[bytes, Trial] = {}
        self._known_characters = 0
        self._answers: deque[_Answer] = deque()  # The first answer is being checked.
        self._stopped = False

    async def trial(self, kind: str, text: str, *, compact: bool = True) -> Trial:
        """Return the result of a constraint's trial, from the cache or from the process.

        Args:
            kind: The kind of constraint, by its name in vLLM's `structured_outputs`.
            text: The constraint.
            compact: Whether JSON has no white space.

        Raises:
            GenerationFailed: No process can be started.
            Overloaded: The constraint has waited too long, or the process ended for a reason other than the constraint.
            EngineDead: The server is stopping.
        """
        key = hashlib.sha256(f"{kind}\0{compact}\0{text}".encode()).digest()
        if (known := self._known.get(key)) is not None:
            return known
        if self._stopped:
            raise EngineDead(_STOPPING)
        message = {"kind": kind, "text": text, "compact": compact}
        trial = asyncio.get_running_loop().run_in_executor(self._thread, self._try, key, message)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await trial
        except TimeoutError:
            raise Overloaded(f"the constraint has waited {WAIT_SECONDS:g} s to be compiled; try again later") from None
        except asyncio.CancelledError:
            if self._stopped:
                raise EngineDead(_STOPPING) from None
            raise

    def _try(self, key: bytes, message: dict[str, Any]) -> Trial:
        if (known := self._known.get(key)) is not None:  # Another request had the same constraint.
            return known
        # If the process had already ended before it read the constraint, a new process gets the constraint.
        if (result := self._tried(message) or self._tried(message)) is None:
            raise Overloaded(NO_VERDICT)
        if result.error == TOO_MUCH:
            logger.warning("a constraint takes too much time or memory to compile; it is refused")
        self._known[key] = result
        self._known_characters += _characters(result)
        while len(self._known) > _REMEMBERED or self._known_characters > _REMEMBERED_CHARACTERS:
            self._known_characters -= _characters(self._known.pop(next(iter(self._known))))
        return result

    def _tried(self, message: dict[str, Any]) -> Trial | None:
        """Return the result from the process. None if the process ended for a reason other than the constraint.

        Raises:
            GenerationFailed, Overloaded, EngineDead: as `trial`.
        """
        process = self._started()
        with _ended_after(CLOCK_SECONDS, process):
            try:
                return _exchange(process, message, Trial)
            except (OSError, ValueError) as error:
                code = process.wait()
                if self._stopped:
                    raise EngineDead(_STOPPING) from None
                was_read = not isinstance(error, BrokenPipeError)
        if code in _VERDICTS:
            return Trial(TOO_MUCH) if was_read else None
        if code < 0:
            logger.warning("the process that compiles constraints was ended from outside, or took too long")
            raise Overloaded(NO_VERDICT)
        logger.warning("the process that compiles constraints has ended with code %d", code)
        return None

    def check(self, schema: str, answer: str, tell: Callable[[str], None]) -> None:
        """Queue the check of an answer against its schema. Call it on the event loop.

        Args:
            schema: The whole schema.
            answer: The text of the finished answer.
            tell: Receives the verdict on the event loop. It is one of `engines.statistics.VERDICTS`.
        """
        if self._stopped or len(self._answers) >= _WAITING_ANSWERS or len(answer) > _ANSWER_CHARACTERS:
            tell("unchecked")
            return
        self._answers.append(_Answer(schema, answer, tell))
        if len(self._answers) == 1:
            self._check_next()

    def _check_next(self) -> None:
        first = self._answers[0]
        check = asyncio.get_running_loop().run_in_executor(self._thread, self._verdict, first.schema, first.text)
        check.add_done_callback(self._checked)

    def _checked(self, check: asyncio.Future[str]) -> None:
        self._answers.popleft().tell("unchecked" if check.cancelled() else check.result())
        if self._stopped:
            self._answers.clear()
        elif self._answers:
            self._check_next()

    def _verdict(self, schema: str, answer: str) -> str:
        try:
            process = self._started()
            with _ended_after(CLOCK_SECONDS, process):
                try:
                    return _exchange(process, {"schema": schema, "answer": answer}, str)
                except (OSError, ValueError):
                    logger.warning("the process that checks answers has ended (%d)", process.wait())
                    return "unchecked"
        except GenerationFailed:  # The process cannot be started.
            return "unchecked"
        except Exception:
            logger.exception("an answer cannot be checked against its schema")
            return "unchecked"

    def _started(self) -> Popen[str]:
        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            _close_pipes(self._process)
        try:
            self._process = process = Popen(
                [sys.executable, "-P", "-m", trial_process.__name__],
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                text=True,
                start_new_session=True,
            )
            with _ended_after(START_SECONDS, process):
                _exchange(process, self._first, Trial)
        except (OSError, ValueError) as error:
            logger.exception("the process that compiles constraints cannot be started")
            raise GenerationFailed("constraints cannot be compiled at present") from error
        return process

    async def stop(self) -> None:
        """End the process. Waiting requests get `EngineDead`."""
        self._stopped = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            _close_pipes(self._process)


def _characters(trial: Trial) -> int:
    return len(trial.text) + len(trial.error) + sum(map(len, trial.not_held))


def _close_pipes(process: Popen[str]) -> None:
    """Close the pipes of a process that has ended."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # Buffered data can no longer be sent.
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def _ended_after(seconds: float, process: Popen[str]) -> Iterator[None]:
    """Kill the process if the `with` block takes longer: a suspended process would block the thread forever."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exchange(process: Popen[str], message: object, kind: type[_T]) -> _T:
    """Send a message, and return the answer as a value of type `kind`.

    Raises:
        OSError: The process has ended.
        ValueError: The process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()
    return msgspec.json.decode(process.stdout.readline(), type=kind)
