"""From a request's constraint to vLLM's structured outputs.

vLLM has several back ends for them, and one for a whole engine: with its setting `auto` each request is checked against
the back end that suits it best, but enforced by the one that the first request happened to get. So one is chosen when
the model is loaded: `guidance` (llguidance), which refuses constraints that it cannot enforce, and bounds their cost.

A constraint is a program that a client has sent, so it is compiled once in a separate process (`grammar_trial`) before
the engine gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from tokenizers import Tokenizer
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from engines.errors import EngineDead, GenerationFailed, InvalidParameter, Overloaded
from engines.loaded_model import fast_tokenizer
from engines.request import Constraint, SamplingParameters
from engines.vllm import grammar_trial
from engines.vllm.expressions import ascii_expression, grammar_for_guidance

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 1 << 17  # Of a schema, an expression or a grammar: what people write has a hundredth of it.
_MAX_WITH_WHITE_SPACE = 8 * MAX_CHARACTERS  # Of a schema that is still to be read.
MAX_CHOICE_CHARACTERS = 1 << 21  # Of all choices together; they cost the engine less, since each is a plain text.
_ERROR_CHARACTERS = 200
_FOR_GUIDANCE: Mapping[str, Callable[[str], str]] = {"regex": ascii_expression, "grammar": grammar_for_guidance}
_LONG = 4096  # Characters of an expression or a grammar. Longer ones hold up the event loop.
# How long a request waits until its constraint has been tried out, those before it included, before it is refused.
WAIT_SECONDS = 60.0
# How long the process may take for its start, and for one constraint, by the clock. Longer than its own limit, which
# counts processor time: a busy machine may give it little, and a process that is stopped gets none.
START_SECONDS, CLOCK_SECONDS = 60.0, 20.0
_REMEMBERED = 1024
TOO_MUCH = "it takes too much time or memory to compile"
NO_VERDICT = "the constraint could not be compiled; try again later"
# Signals by which a constraint ends the process: its limit of processor time, no more memory, no more stack.
_VERDICTS = {-number for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)}
_STOPPING = "the server is stopping; the request was not completed"
_NO_TAGS = (
    'is not enforced by this model\'s back end: it needs option.structured_outputs_config={"backend": "xgrammar"}'
)
_NO_SCHEMA, _TOO_DEEP = "must be a JSON schema, which is a JSON object", "is nested too deeply"
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf")
# llguidance's options for writing JSON, which stand in the schema in the place of the client's.
_FLEXIBLE = {"whitespace_flexible": True}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_WHITE_SPACE = "disable_any_whitespace"
_COMBINED = ("anyOf", "oneOf", "$ref", "if", "unevaluatedProperties", "additionalProperties")


def choose_backend(config: VllmConfig, option: str) -> None:
    """Set what `structured_outputs_config` leaves open: the back end, and that JSON is compact.

    A model that may write any white space sometimes writes nothing else.

    Args:
        config: of an engine that is not made yet.
        option: the text of `structured_outputs_config`, which vLLM has read.
    """
    structured = config.structured_outputs_config
    if structured.backend == "auto":
        tokenizer = cached_tokenizer_from_config(config.model_config)
        structured.backend = "guidance" if fast_tokenizer(tokenizer) is not None else "xgrammar"
    if structured.backend in ("guidance", "xgrammar") and _WHITE_SPACE not in option:
        structured.disable_any_whitespace = True


class ConstraintTranslator:
    """Makes `StructuredOutputsParams` for one model."""

    def __init__(
        self, tokenizer: Any, vocabulary_size: int, config: StructuredOutputsConfig, *, drafts: bool = False
    ) -> None:
        """Create the translator; `drafts`: the engine takes back tokens that a draft has proposed."""
        self._guidance = config.backend == "guidance"
        self._compact = config.disable_any_whitespace
        self._trials: GrammarTrials | None = None
        if self._guidance and (fast := fast_tokenizer(tokenizer)) is not None:
            # As vLLM's back end makes its own.
            size = max(vocabulary_size, len(tokenizer))
            self._trials = GrammarTrials(fast, size, tokenizer.eos_token_id, drafts=drafts)

    async def structured_outputs(self, sampling: SamplingParameters) -> StructuredOutputsParams | None:
        """Return the constraint for vLLM; None without a constraint.

        Raises:
            InvalidParameter: It cannot be compiled, or not together with another parameter; GenerationFailed,
                Overloaded, EngineDead: as `GrammarTrials.error`.
        """
        constraint = sampling.constraint
        if constraint is None:
            return None
        if constraint.as_is:
            form = constraint.for_vllm()
            if constraint.json_schema is not None:
                _check_size(constraint.parameter, (constraint.json_schema,), _MAX_WITH_WHITE_SPACE, MAX_CHARACTERS)
                form["json"] = _read(constraint.parameter, constraint.json_schema)
            outputs = StructuredOutputsParams(**form)
            return await self.checked(constraint.parameter, SamplingParams(structured_outputs=outputs))
        _check_company(constraint.parameter, sampling)
        kind, text = self._spelled(constraint)
        text = await self._tried(constraint.parameter, kind, text)
        return StructuredOutputsParams(
            **{kind: json.loads(text) if kind == "choice" else text},
            disable_any_whitespace=not constraint.any_whitespace,
        )

    async def checked(self, parameter: str, params: SamplingParams) -> StructuredOutputsParams:
        """Return the structured outputs that vLLM's front end has read, as the engine will follow them.

        Args:
            parameter: The client's name for them.

        Raises:
            InvalidParameter: They would harm the engine, or would not be enforced.
            GenerationFailed, Overloaded, EngineDead: as `GrammarTrials.error`.
        """
        outputs = params.structured_outputs
        assert outputs is not None
        _check_company(parameter, params)
        if self._guidance:
            # The text between its tags may be anything, tags without their schema too.
            if outputs.structural_tag is not None:
                raise InvalidParameter(f"{parameter}.structural_tag", _NO_TAGS)
            outputs = _with_options(parameter, outputs, self._compact or outputs.disable_any_whitespace)
        for kind in ("json", "choice", "regex", "grammar"):  # it has one of them at most
            if (value := getattr(outputs, kind)) is None:
                continue
            text = value if isinstance(value, str) else _written(parameter, value)
            _check_size(parameter, (text,), MAX_CHOICE_CHARACTERS if kind == "choice" else MAX_CHARACTERS)
            tried = await self._tried(parameter, kind, text)
            if tried != text:
                outputs = dataclasses.replace(outputs, **{kind: tried})
        return outputs

    async def _tried(self, parameter: str, kind: str, text: str) -> str:
        """Return the text of a constraint for the back end.

        Raises:
            InvalidParameter: It cannot be compiled.
            GenerationFailed, Overloaded, EngineDead: as `GrammarTrials.error`.
        """
        error = ""
        if self._guidance and (written := _FOR_GUIDANCE.get(kind)) is not None:
            try:
                text = written(text) if len(text) <= _LONG else await asyncio.to_thread(written, text)
            except ValueError as fault:
                error = str(fault)
        if not error and self._trials is not None:
            error = await self._trials.error(kind, text)
        if error:
            raise InvalidParameter(parameter, f"cannot be used as a constraint: {_shortened(error)}")
        return text

    def _spelled(self, constraint: Constraint) -> tuple[str, str]:
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
            schema = _schema(constraint.parameter, constraint.json_schema)
        if self._guidance:
            compact = self._compact or not constraint.any_whitespace
            schema["x-guidance"] = _COMPACT if compact else _FLEXIBLE
        return "json", _written(constraint.parameter, schema)

    async def stop(self) -> None:
        if self._trials is not None:
            await self._trials.stop()


def _check_company(parameter: str, sampling: SamplingParameters | SamplingParams) -> None:
    """Refuse parameters that forbid the end of the text, if the constraint may leave no other token to choose."""
    if sampling.min_tokens > 0:
        raise InvalidParameter(parameter, "cannot be used together with a minimum of new tokens")
    if sampling.ignore_eos:
        raise InvalidParameter(parameter, "cannot be used together with `ignore_eos`")


def no_token_left(sampling: SamplingParameters | SamplingParams) -> InvalidParameter | None:
    """Return the error of a request that the engine has ended if it may have forbidden all tokens of its constraint."""
    name = "allowed_token_ids" if sampling.allowed_token_ids is not None else "bad_words"
    if not getattr(sampling, name):
        return None
    return InvalidParameter(name, "forbids every token that the constraint allows in one place of the text")


def _check_size(parameter: str, texts: tuple[str, ...], most: int, shown: int | None = None) -> None:
    """Refuse texts with more than `most` characters. The message has `shown` in place of `most`."""
    if (count := sum(map(len, texts))) > most:
        raise InvalidParameter(parameter, f"must have at most {shown or most} characters, got {count}")
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(parameter, "must not hold half of a surrogate pair") from None


def _schema(parameter: str, text: str) -> dict[str, Any]:
    schema = _read(parameter, text)
    if not isinstance(schema, dict):
        raise InvalidParameter(parameter, _NO_SCHEMA)
    try:
        _tighten(schema, closed='"allOf"' not in text)
    except RecursionError:
        raise InvalidParameter(parameter, _TOO_DEEP) from None
    return schema


def _read(parameter: str, schema: str) -> Any:
    try:
        return json.loads(schema)
    except RecursionError:
        raise InvalidParameter(parameter, _TOO_DEEP) from None
    except ValueError:
        raise InvalidParameter(parameter, _NO_SCHEMA) from None


def _written(parameter: str, schema: Any) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise InvalidParameter(parameter, _TOO_DEEP) from None


def _with_options(parameter: str, outputs: StructuredOutputsParams, compact: bool) -> StructuredOutputsParams:
    """Tighten the schema, and write into it that its JSON is `compact`: the back end follows the option of the whole
    engine alone."""
    if outputs.json is None and not (outputs.json_object and compact):
        return outputs
    text = outputs.json if isinstance(outputs.json, str) else _written(parameter, outputs.json or {"type": "object"})
    _check_size(parameter, (text,), MAX_CHARACTERS)
    schema = _schema(parameter, text)
    if compact:
        schema["x-guidance"] = _COMPACT
    return dataclasses.replace(outputs, json=_written(parameter, schema), json_object=None)


def _below(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas right below one, each with the keyword that has it."""
    for keyword in _MAPS_OF_SCHEMAS:
        members = schema.get(keyword)
        for value in members.values() if isinstance(members, dict) else ():
            if isinstance(value, dict):
                yield keyword, value
    for keyword in _SCHEMAS:
        values = schema.get(keyword)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, dict):
                yield keyword, value


def _tighten(schema: dict[str, Any], closed: bool) -> None:
    """Let what names members be an object and, if it is `closed`, have no others.

    By the standard `{"properties": ...}` allows any number or text as well, which nobody means who writes it, and any
    further members: a model that may add some seldom stops, and vLLM's usual back end does not allow them either.
    Schemas that are combined with others stay open.
    """
    named = isinstance(schema.get("properties"), dict)
    for keyword, part in _below(schema):
        _tighten(part, closed and not (named and keyword in ("anyOf", "oneOf")))
    if not named:
        return
    schema.setdefault("type", "object")
    if closed and not any(keyword in schema for keyword in _COMBINED):
        schema["additionalProperties"] = False


def _shortened(error: str) -> str:
    line = next((line for line in error.splitlines() if line.strip()), "it is not understood").strip()
    return line if len(line) <= _ERROR_CHARACTERS else line[:_ERROR_CHARACTERS] + "…"


class GrammarTrials:
    """Tries constraints out, each once and one after another, in a process that is started with the first."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary_size: int, eos_token_id: int | None, *, drafts: bool = False
    ) -> None:
        plain = json.loads(tokenizer.to_str()) | {"padding": None, "truncation": None}  # as llguidance wants it
        self._first = {
            "tokenizer": json.dumps(plain),
            "vocabulary_size": vocabulary_size,
            "eos": eos_token_id,
            "drafts": drafts,
        }
        self._process: Popen[str] | None = None
        # Starts the process and waits for its answers; the kernel ends the process with it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._known: dict[bytes, str] = {}
        self._stopped = False

    async def error(self, kind: str, text: str) -> str:
        """Return the fault of a constraint, as the end of a sentence; "" if nothing was found.

        Raises:
            GenerationFailed: No process can be started.
            Overloaded: Too many constraints are tried out before it, or it was not its fault that the process ended.
            EngineDead: The server is stopping.
        """
        key = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
        if (known := self._known.get(key)) is not None:
            return known
        if self._stopped:
            raise EngineDead(_STOPPING)
        trial = asyncio.get_running_loop().run_in_executor(self._thread, self._try, key, {"kind": kind, "text": text})
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await trial
        except TimeoutError:
            raise Overloaded(f"the constraint has waited {WAIT_SECONDS:g} s to be compiled; try again later") from None
        except asyncio.CancelledError:
            if self._stopped:
                raise EngineDead(_STOPPING) from None
            raise

    def _try(self, key: bytes, message: dict[str, str]) -> str:
        if (known := self._known.get(key)) is not None:  # another request had the same
            return known
        process = self._started()
        with _ended_after(CLOCK_SECONDS, process):
            try:
                error = _exchange(process, message)
            except (OSError, ValueError):
                code = process.wait()
                if self._stopped:
                    raise EngineDead(_STOPPING) from None
                if code < 0 and code not in _VERDICTS:
                    logger.warning("the process that compiles constraints was ended from outside, or took too long")
                    raise Overloaded(NO_VERDICT) from None
                logger.warning("a constraint ended the process that compiles it first (%s); it is refused", code)
                error = TOO_MUCH
        if len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[key] = error
        return error

    def _started(self) -> Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        try:
            self._process = process = Popen(
                [sys.executable, "-P", grammar_trial.__file__],  # -P: its folder has modules named like packages
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                text=True,
                start_new_session=True,
            )
            with _ended_after(START_SECONDS, process):
                _exchange(process, self._first)
        except (OSError, ValueError) as error:
            logger.exception("the process that compiles constraints cannot be started")
            raise GenerationFailed("constraints cannot be compiled at present") from error
        return process

    async def stop(self) -> None:
        """End the process. Whoever waits for an answer is told that the engine is gone."""
        self._stopped = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


@contextlib.contextmanager
def _ended_after(seconds: float, process: Popen[str]) -> Iterator[None]:
    """Kill a process that takes longer. One that is stopped reads nothing either, so it would hold up who writes."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exchange(process: Popen[str], message: object) -> str:
    """Send a message and return the answer.

    Raises:
        OSError: The process has ended.
        ValueError: The process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()
    answer: str = json.loads(process.stdout.readline())
    return answer
