"""From a request's constraint to vLLM's structured outputs.

vLLM has several back ends for them, and one for a whole engine: with its setting `auto` each request is checked against
the back end that suits it best, but enforced by the one that the first request happened to get. So one is chosen when
the model is loaded: `guidance` (llguidance), which refuses constraints that it cannot enforce, and bounds their cost.

A constraint is a program that a client has sent, so it is rewritten and compiled once in a separate process (`trials`)
before the engine gets it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from engines.errors import InvalidParameter
from engines.loaded_model import fast_tokenizer
from engines.request import SamplingParameters
from engines.vllm.constraints.trials import GrammarTrials

_MAX_CHARACTERS = 1 << 17  # Of an expression or a grammar: what people write has a hundredth of it.
# The most characters of each kind of constraint, by vLLM's names.
_MOST_CHARACTERS = {
    "json": 1 << 20,  # As it comes. What is left of it for the back end has a limit of its own.
    "choice": 1 << 21,  # All together. They cost the engine less, since each is a plain text.
    "regex": _MAX_CHARACTERS,
    "grammar": _MAX_CHARACTERS,
}
_ERROR_CHARACTERS = 200
_NO_TAGS = (
    'is not enforced by this model\'s back end: it needs option.structured_outputs_config={"backend": "xgrammar"}'
)
_WHITE_SPACE = "disable_any_whitespace"


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
                Overloaded, EngineDead: as `GrammarTrials.trial`.
        """
        constraint = sampling.constraint
        if constraint is None:
            return None
        outputs = StructuredOutputsParams(**constraint.for_vllm())
        if not constraint.as_is:
            outputs.disable_any_whitespace = not constraint.any_whitespace
        return await self._checked(constraint.parameter, outputs, sampling)

    async def checked(self, parameter: str, params: SamplingParams) -> StructuredOutputsParams:
        """Return the structured outputs that vLLM's front end has read, as the engine will follow them.

        Args:
            parameter: The client's name for them.

        Raises:
            InvalidParameter: They would harm the engine, or would not be enforced.
            GenerationFailed, Overloaded, EngineDead: as `GrammarTrials.trial`.
        """
        assert params.structured_outputs is not None
        return await self._checked(parameter, params.structured_outputs, params)

    async def _checked(
        self, parameter: str, outputs: StructuredOutputsParams, sampling: SamplingParameters | SamplingParams
    ) -> StructuredOutputsParams:
        _check_company(parameter, sampling)
        # The text between its tags may be anything, tags without their schema too.
        if self._guidance and outputs.structural_tag is not None:
            raise InvalidParameter(f"{parameter}.structural_tag", _NO_TAGS)
        compact = self._compact or outputs.disable_any_whitespace
        if self._guidance and outputs.json_object:
            # The back end follows the option of the whole engine alone, except within a schema.
            outputs = dataclasses.replace(outputs, json={"type": "object"}, json_object=None)
        for kind, most in _MOST_CHARACTERS.items():  # it has one of them at most
            if (value := getattr(outputs, kind)) is None:
                continue
            text = value if isinstance(value, str) else _written(parameter, value)
            _check_size(parameter, text, most)
            if self._trials is None:
                continue
            trial = await self._trials.trial(kind, text, compact=compact)
            if trial.error:
                raise InvalidParameter(parameter, f"cannot be used as a constraint: {_shortened(trial.error)}")
            outputs = dataclasses.replace(outputs, **{kind: trial.text if kind != "choice" else value})
        return outputs

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


def _check_size(parameter: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidParameter(parameter, f"must have at most {most} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(parameter, "must not hold half of a surrogate pair") from None


def _written(parameter: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise InvalidParameter(parameter, "is nested too deeply") from None


def _shortened(error: str) -> str:
    line = next((line for line in error.splitlines() if line.strip()), "it is not understood").strip()
    return line if len(line) <= _ERROR_CHARACTERS else line[:_ERROR_CHARACTERS] + "…"
