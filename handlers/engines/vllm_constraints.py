"""From a request's constraint to vLLM's structured outputs.

vLLM has several back ends for them, and one for a whole engine: with its setting `auto` each request is checked against
the back end that suits it best, but enforced by the one that the first request happened to get. So one is chosen when
the model is loaded: `guidance` (llguidance), which refuses what it cannot enforce and bounds what a constraint costs.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from handlers.engines.grammar_trials import GrammarTrials
from handlers.errors import InvalidParameter
from handlers.request import Constraint, SamplingParameters

MAX_CHARACTERS = 1 << 17
"""Of a schema, an expression or a grammar: what people write has a hundredth of it."""
MAX_CHOICE_CHARACTERS = 1 << 21
"""Of all choices together; they cost the engine less, since each is a plain text."""
_ERROR_CHARACTERS = 200
_THREADS = 2
"""What vLLM checks again may take tenths of a second; it does not take the threads that tokenize prompts."""

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
_COMBINED = ("anyOf", "oneOf", "$ref", "if", "unevaluatedProperties", "additionalProperties")


def choose_backend(config: VllmConfig) -> None:
    """Set the back end for structured outputs where it was left to vLLM; to be called before the engine is made."""
    structured = config.structured_outputs_config
    if structured.backend == "auto":
        tokenizer = cached_tokenizer_from_config(config.model_config)
        structured.backend = "guidance" if _json_of(tokenizer) else "xgrammar"


class ConstraintTranslator:
    """Makes `StructuredOutputsParams` for one model."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, backend: str) -> None:
        self._guidance = backend == "guidance"
        self._trials: GrammarTrials | None = None
        if self._guidance and (text := _json_of(tokenizer)):
            # As vLLM's back end makes its own.
            self._trials = GrammarTrials(text, max(vocabulary_size, len(tokenizer)), tokenizer.eos_token_id)
        self.threads: Executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="constraints")
        """Where vLLM's own checks of a constraint run, which would hold up the event loop."""

    async def structured_outputs(self, sampling: SamplingParameters) -> StructuredOutputsParams | None:
        """What vLLM is to enforce; None without a constraint.

        Raises:
            InvalidParameter: it cannot be compiled, or not together with another parameter; nothing was started.
            GenerationFailed: it cannot be found out whether it can.
        """
        constraint = sampling.constraint
        if constraint is None:
            return None
        _check_company(constraint, sampling)
        kind, text = self._spelled(constraint)
        if self._trials is not None:
            error = await self._trials.error(kind, text)
            if error is not None:
                raise InvalidParameter(constraint.parameter, f"cannot be used as a constraint: {_shortened(error)}")
        return StructuredOutputsParams(
            **{kind: json.loads(text) if kind == "choice" else text},
            disable_any_whitespace=not constraint.any_whitespace,
        )

    def _spelled(self, constraint: Constraint) -> tuple[str, str]:
        """Its kind and its text, as vLLM calls and takes them."""
        _check_text(constraint)
        if constraint.choice is not None:
            if not constraint.choice:
                raise InvalidParameter(constraint.parameter, "must have at least one choice")
            return "choice", json.dumps(list(dict.fromkeys(constraint.choice)))
        if constraint.regex is not None:
            return "regex", constraint.regex
        if constraint.grammar is not None:
            return "grammar", constraint.grammar
        schema = {"type": "object"} if constraint.json_schema is None else _schema(constraint, constraint.json_schema)
        if self._guidance:
            schema["x-guidance"] = _writing(constraint.any_whitespace)
        return "json", json.dumps(schema)

    def stop(self) -> None:
        """Free what it holds."""
        if self._trials is not None:
            self._trials.stop()
        self.threads.shutdown(wait=False, cancel_futures=True)


def _check_company(constraint: Constraint, sampling: SamplingParameters) -> None:
    """A constraint says where the text ends; what forbids that end would leave no token to choose."""
    if sampling.min_tokens > 0:
        raise InvalidParameter(constraint.parameter, "cannot be used together with a minimum of new tokens")
    if sampling.ignore_eos:
        raise InvalidParameter(constraint.parameter, "cannot be used together with `ignore_eos`")


def _check_text(constraint: Constraint) -> None:
    if constraint.choice is not None:
        texts, most = constraint.choice, MAX_CHOICE_CHARACTERS
    else:
        texts = (constraint.json_schema or constraint.regex or constraint.grammar or "",)
        most = MAX_CHARACTERS
    if (count := sum(map(len, texts))) > most:
        raise InvalidParameter(constraint.parameter, f"must have at most {most} characters, got {count}")
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(constraint.parameter, "must not hold half of a surrogate pair") from None


def _schema(constraint: Constraint, text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
        if isinstance(schema, dict):
            if '"allOf"' not in text:
                _close(schema)
            return schema
    except RecursionError:
        raise InvalidParameter(constraint.parameter, "is nested too deeply") from None
    except ValueError:
        pass
    raise InvalidParameter(constraint.parameter, "must be a JSON schema, which is a JSON object")


def _close(schema: Any) -> None:
    """Let objects have no members beyond those that the schema names.

    By the standard they may have any; a model that may add members seldom stops, and vLLM's usual back end does not
    allow them either. Schemas that are combined with others stay as they are.
    """
    if isinstance(schema, list):
        for item in schema:
            _close(item)
        return
    if not isinstance(schema, dict):
        return
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(named := schema.get(name), dict):
            for value in named.values():
                _close(value)
    named = isinstance(schema.get("properties"), dict)
    for name in _SCHEMAS:
        if not (named and name in ("anyOf", "oneOf")):
            _close(schema.get(name))
    if named and not any(name in schema for name in _COMBINED):
        schema["additionalProperties"] = False


def _writing(any_whitespace: bool) -> dict[str, Any]:
    """llguidance's own options, which it takes from the schema; what a client has put there does not count."""
    if any_whitespace:
        return {"whitespace_flexible": True}
    return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


def _json_of(tokenizer: Any) -> str | None:
    """A fast tokenizer as JSON; None of another kind. Without padding and truncation, as llguidance wants it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    written = json.loads(backend.to_str())
    return json.dumps(written | {"padding": None, "truncation": None})


def _shortened(error: str) -> str:
    line = next((line for line in error.splitlines() if line.strip()), "it is not understood").strip()
    return line if len(line) <= _ERROR_CHARACTERS else line[:_ERROR_CHARACTERS] + "…"


async def in_thread(threads: Executor, function: Any, *arguments: Any) -> Any:
    """Call a function in one of `threads`."""
    return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
