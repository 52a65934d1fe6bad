"""From a request's constraint to vLLM's structured outputs.

vLLM has several back ends for them, and one for a whole engine: with its setting `auto` each request is checked against
the back end that suits it best, but enforced by the one that the first request happened to get. So one is chosen when
the model is loaded: `guidance` (llguidance), which refuses what it cannot enforce and bounds what a constraint costs.

A constraint is a program that a client has sent, so it is compiled once in a process of its own (`grammar_trial`)
before the engine gets it.
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
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from handlers.engines.texts import fast_tokenizer
from handlers.engines.vllm import grammar_trial
from handlers.errors import EngineDead, GenerationFailed, InvalidParameter, Overloaded
from handlers.request import Constraint, SamplingParameters

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 1 << 17
"""Of a schema, an expression or a grammar: what people write has a hundredth of it."""
MAX_CHOICE_CHARACTERS = 1 << 21
"""Of all choices together; they cost the engine less, since each is a plain text."""
_ERROR_CHARACTERS = 200
PROCESSES = 2
MOST_WAITING = 64
"""Constraints that wait for a process; further ones are refused at once."""
WAIT_SECONDS = 20.0
"""How long a constraint waits for a process before it is refused."""
_START_SECONDS, _ANSWER_SECONDS = 60.0, 20.0
"""By the clock, where a busy machine may give it little time; its processor time has a limit of its own."""
_REMEMBERED = 1024
_LENGTH = struct.Struct(">I")
_THREADS = 2
"""vLLM checks each constraint again, for tenths of a second; the threads that tokenize prompts stay free."""
TOO_MUCH = "it takes too much time or memory to compile"
_STOPPING = "the server is stopping; the request was not completed"
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
_COMBINED = ("anyOf", "oneOf", "$ref", "if", "unevaluatedProperties", "additionalProperties")


def choose_backend(config: VllmConfig) -> None:
    """Set the back end for structured outputs where it was left to vLLM; to be called before the engine is made."""
    structured = config.structured_outputs_config
    if structured.backend == "auto":
        tokenizer = cached_tokenizer_from_config(config.model_config)
        structured.backend = "guidance" if fast_tokenizer(tokenizer) is not None else "xgrammar"


class CheckingLLM(AsyncLLM):  # type: ignore[misc]
    """vLLM's engine, which tries out the constraints of requests that are given to it directly, by vLLM's own server.

    Without that, a schema of 30 kB ends the process: the compiler's stack overflows.
    """

    constraints: ConstraintTranslator | None = None
    """Known once the engine is loaded."""
    typical_refusal = ""
    """Why `typical_p` in `vllm_xargs` is refused, after its name; "" if it is not."""

    async def add_request(self, request_id: str, prompt: Any, params: Any, *arguments: Any, **options: Any) -> Any:
        """Try the constraint out, and go on as `AsyncLLM` does.

        Raises:
            VLLMValidationError: the request's structured outputs cannot be compiled.
            GracefulHTTPError: 503, too many wait to be tried out.
            EngineDeadError: the server is stopping.
        """
        outputs = getattr(params, "structured_outputs", None)
        if outputs is not None and self.constraints is not None:
            try:
                await self.constraints.check("structured_outputs", outputs)
            except InvalidParameter as error:
                raise VLLMValidationError(error.message, parameter=error.parameter) from None
            except Overloaded as error:
                raise GracefulHTTPError(error.message, HTTPStatus.SERVICE_UNAVAILABLE) from None
            except EngineDead:
                raise EngineDeadError from None
        return await super().add_request(request_id, prompt, params, *arguments, **options)


class ConstraintTranslator:
    """Makes `StructuredOutputsParams` for one model."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, backend: str) -> None:
        self._guidance = backend == "guidance"
        self._trials: GrammarTrials | None = None
        if self._guidance and (fast := fast_tokenizer(tokenizer)) is not None:
            # As vLLM's back end makes its own.
            size = max(vocabulary_size, len(tokenizer))
            self._trials = GrammarTrials(_as_json(fast), size, tokenizer.eos_token_id)
        self.threads: Executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="constraints")
        """Run vLLM's own checks of a constraint, which would hold up the event loop."""

    async def structured_outputs(self, sampling: SamplingParameters) -> StructuredOutputsParams | None:
        """Return what vLLM is to enforce; None without a constraint.

        Raises:
            InvalidParameter: it cannot be compiled, or not together with another parameter.
            GenerationFailed, Overloaded, EngineDead: as `GrammarTrials.error`.
        """
        constraint = sampling.constraint
        if constraint is None:
            return None
        _check_company(constraint, sampling)
        kind, text = self._spelled(constraint)
        await self._try(constraint.parameter, kind, text)
        return StructuredOutputsParams(
            **{kind: json.loads(text) if kind == "choice" else text},
            disable_any_whitespace=not constraint.any_whitespace,
        )

    async def check(self, parameter: str, outputs: StructuredOutputsParams) -> None:
        """Refuse structured outputs that vLLM's front end has read and that would harm the engine.

        `parameter`: what the client called them. Raises as `structured_outputs`.
        """
        for kind, text in _parts(outputs):
            _check_size(parameter, (text,), MAX_CHOICE_CHARACTERS if kind == "choice" else MAX_CHARACTERS)
            await self._try(parameter, kind, text)

    async def _try(self, parameter: str, kind: str, text: str) -> None:
        error = None if self._trials is None else await self._trials.error(kind, text)
        if error is not None:
            raise InvalidParameter(parameter, f"cannot be used as a constraint: {_shortened(error)}")

    def _spelled(self, constraint: Constraint) -> tuple[str, str]:
        """Return the constraint's kind and text, as vLLM calls and takes them."""
        if constraint.choice is not None:
            _check_size(constraint.parameter, constraint.choice, MAX_CHOICE_CHARACTERS)
            if not constraint.choice:
                raise InvalidParameter(constraint.parameter, "must have at least one choice")
            return "choice", json.dumps(list(dict.fromkeys(constraint.choice)))
        program = constraint.json_schema or constraint.regex or constraint.grammar or ""
        _check_size(constraint.parameter, (program,), MAX_CHARACTERS)
        if constraint.regex is not None:
            return "regex", constraint.regex
        if constraint.grammar is not None:
            return "grammar", constraint.grammar
        schema: dict[str, Any] = {"type": "object"}
        if constraint.json_schema is not None:
            schema = _schema(constraint, constraint.json_schema)
        if self._guidance:
            schema["x-guidance"] = _writing(constraint.any_whitespace)
        return "json", json.dumps(schema)

    async def stop(self) -> None:
        """End the processes and threads."""
        if self._trials is not None:
            await self._trials.stop()
        self.threads.shutdown(wait=False, cancel_futures=True)


def _check_company(constraint: Constraint, sampling: SamplingParameters) -> None:
    """Refuse parameters that forbid the end of the text, where the constraint may leave no other token to choose."""
    if sampling.min_tokens > 0:
        raise InvalidParameter(constraint.parameter, "cannot be used together with a minimum of new tokens")
    if sampling.ignore_eos:
        raise InvalidParameter(constraint.parameter, "cannot be used together with `ignore_eos`")


def _check_size(parameter: str, texts: tuple[str, ...], most: int) -> None:
    if (count := sum(map(len, texts))) > most:
        raise InvalidParameter(parameter, f"must have at most {most} characters, got {count}")
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(parameter, "must not hold half of a surrogate pair") from None


def _schema(constraint: Constraint, text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
        if isinstance(schema, dict):
            _name_objects(schema)
            if '"allOf"' not in text:
                _close(schema)
            return schema
    except RecursionError:
        raise InvalidParameter(constraint.parameter, "is nested too deeply") from None
    except ValueError:
        pass
    raise InvalidParameter(constraint.parameter, "must be a JSON schema, which is a JSON object")


def _below(schema: dict[str, Any], names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the schemas right below one: those of its maps, and those under `names`, alone or in lists."""
    maps = [schema.get(name) for name in _MAPS_OF_SCHEMAS]
    values = [value for members in maps if isinstance(members, dict) for value in members.values()]
    values += [schema.get(name) for name in names]
    for value in values:
        yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, dict))


def _name_objects(schema: dict[str, Any]) -> None:
    """Let what names members be an object.

    By the standard `{"properties": ...}` allows any number or text as well, and people who write it never mean that.
    """
    for part in _below(schema, (*_SCHEMAS, "allOf")):
        _name_objects(part)
    if "type" not in schema and isinstance(schema.get("properties"), dict):
        schema["type"] = "object"


def _close(schema: dict[str, Any]) -> None:
    """Let objects have no members beyond those that the schema names.

    By the standard they may have any; a model that may add members seldom stops, and vLLM's usual back end does not
    allow them either. Schemas that are combined with others stay as they are.
    """
    named = isinstance(schema.get("properties"), dict)
    for part in _below(schema, [name for name in _SCHEMAS if not (named and name in ("anyOf", "oneOf"))]):
        _close(part)
    if named and not any(name in schema for name in _COMBINED):
        schema["additionalProperties"] = False


def _writing(any_whitespace: bool) -> dict[str, Any]:
    """Return llguidance's options for writing JSON, which stand in the schema in the place of the client's."""
    if any_whitespace:
        return {"whitespace_flexible": True}
    return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


def _parts(outputs: StructuredOutputsParams) -> list[tuple[str, str]]:
    """Return what of them is compiled, with its kind; a structural tag holds schemas."""
    if outputs.json is not None:
        return [("json", outputs.json if isinstance(outputs.json, str) else json.dumps(outputs.json))]
    if outputs.choice is not None:
        return [("choice", json.dumps(outputs.choice))]
    if outputs.regex is not None:
        return [("regex", outputs.regex)]
    if outputs.grammar is not None:
        return [("grammar", outputs.grammar)]
    if outputs.structural_tag is None:
        return []
    try:
        return [("json", json.dumps(part["schema"])) for part in json.loads(outputs.structural_tag)["structures"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # vLLM says what is wrong with it


def _as_json(fast: Any) -> str:
    """Write a tokenizer without padding and truncation, as llguidance wants it."""
    written = json.loads(fast.to_str())
    return json.dumps(written | {"padding": None, "truncation": None})


def _shortened(error: str) -> str:
    line = next((line for line in error.splitlines() if line.strip()), "it is not understood").strip()
    return line if len(line) <= _ERROR_CHARACTERS else line[:_ERROR_CHARACTERS] + "…"


async def in_thread(threads: Executor, function: Any, *arguments: Any) -> Any:
    """Call a function in one of `threads`.

    Raises:
        EngineDead: they have been shut down, or are while it waits for one.
    """
    try:
        waiting = asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
    except RuntimeError:
        raise EngineDead(_STOPPING) from None
    try:
        return await waiting
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineDead(_STOPPING) from None


@dataclass(slots=True, eq=False)
class _Question:
    """A constraint that is being tried out, for one client or several."""

    clients: int = 0
    begun: bool = False
    """A process has it; the exchange with the process must be completed."""
    answer: asyncio.Task[str | None] = field(init=False)


class GrammarTrials:
    """Tries constraints out, each once, in processes that are started as they are needed."""

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
        """Return what is wrong with a constraint, as the end of a sentence; None if nothing was found.

        Raises:
            GenerationFailed: no process can be started.
            Overloaded: too many constraints wait, or this one has waited for too long.
            EngineDead: the server is stopping.
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
                raise EngineDead(_STOPPING) from None
            raise
        finally:
            question.clients -= 1
            if not question.clients and not question.begun:  # all who asked have gone
                self._forget(key, question)
                question.answer.cancel()

    def _ask(self, key: bytes, message: dict[str, str]) -> _Question:
        if self._stopped:
            raise EngineDead(_STOPPING)
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
        """Try one constraint out, as `GrammarTrials.error`; one caller at a time."""
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
