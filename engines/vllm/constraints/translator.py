"""Translates a request's constraint to vLLM's structured outputs.

vLLM has several back ends for constraints, but an engine uses only one. With vLLM's setting `auto`, vLLM checks each
request against the back end that suits the request best. But the engine enforces all constraints with the back end that
suited the first of them. So Slipway chooses the back end when the model is loaded: `guidance` (llguidance) if the model
has a fast tokenizer, otherwise `xgrammar`. `guidance` limits the cost of constraints, and refuses the constraints that
it cannot enforce.

A constraint is a program that a client has sent. So with `guidance`, a separate process (`trials`) rewrites and
compiles it before the engine gets it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from engines.errors import InvalidParameter
from engines.loaded_model import fast_tokenizer
from engines.request import SamplingParameters, SchemaPart
from engines.statistics import EngineStatistics
from engines.vllm.constraints.json_schema import WHOLE
from engines.vllm.constraints.trial_process import Trial
from engines.vllm.constraints.trials import GrammarTrials
from engines.vllm.patches.grammars import tried

# The maximum length of an expression or a grammar. People write at most a hundredth of that.
_MAX_CHARACTERS = 1 << 17
# The maximum number of characters of a constraint, by vLLM's name of its kind.
_MOST_CHARACTERS = {
    "json": 1 << 20,  # The client's schema. The rewritten schema has another limit.
    "choice": 1 << 21,  # All choices together. They are plain text, which costs the engine less.
    "regex": _MAX_CHARACTERS,
    "grammar": _MAX_CHARACTERS,
}
_ERROR_CHARACTERS = 200
_SHOWN_PLACES, _PLACE_CHARACTERS = 5, 100  # Limits for the error message of a schema that is not fully enforced.
_NO_TAGS = (
    'is not enforced by this model\'s back end: it needs option.structured_outputs_config={"backend": "xgrammar"}'
)
_WITHOUT_STRICT = "without `strict` the answer follows what can be held"
_WITH_OPTION = "with option.partial_schemas=true answers follow what can be held"
_WHITE_SPACE = "disable_any_whitespace"


def choose_backend(config: VllmConfig, option: str) -> None:
    """Choose the back end, and make JSON compact. Options that `structured_outputs_config` sets are kept.

    JSON is compact, because a model that may write any white space sometimes writes nothing else.

    Args:
        config: The configuration of an engine that has not started.
        option: The text of `structured_outputs_config`, which vLLM has read.
    """
    structured = config.structured_outputs_config
    if structured.backend == "auto":
        tokenizer = cached_tokenizer_from_config(config.model_config)
        structured.backend = "guidance" if fast_tokenizer(tokenizer) is not None else "xgrammar"
    if structured.backend in ("guidance", "xgrammar") and _WHITE_SPACE not in option:
        structured.disable_any_whitespace = True


class CheckedConstraint(NamedTuple):
    """A constraint as the engine enforces it."""

    outputs: StructuredOutputsParams
    text: str = ""  # The client's text of the constraint. Empty if the back end is not `guidance`.
    not_held: tuple[str, ...] = ()  # The parts of the JSON schema that are not enforced, by the client's names.


class ConstraintTranslator:
    """Makes `StructuredOutputsParams` for one model."""

    def __init__(
        self,
        tokenizer: Any,
        vocabulary_size: int,
        config: StructuredOutputsConfig,
        *,
        drafts: bool = False,
        partial_schemas: bool = False,
    ) -> None:
        """Create the translator.

        Args:
            drafts: Whether the engine uses speculative decoding, and so may reject tokens of a draft.
            partial_schemas: Whether a JSON schema may be enforced only partly if the request does not set `strict`.
        """
        self._partial = partial_schemas
        self._guidance = config.backend == "guidance"
        self._compact = config.disable_any_whitespace
        self._trials: GrammarTrials | None = None
        if self._guidance and (fast := fast_tokenizer(tokenizer)) is not None:
            # vLLM's back end gives its llguidance tokenizer the same vocabulary size.
            size = max(vocabulary_size, len(tokenizer))
            self._trials = GrammarTrials(fast, size, tokenizer.eos_token_id, drafts=drafts)

    async def structured_outputs(self, sampling: SamplingParameters) -> CheckedConstraint | None:
        """Return the constraint for vLLM; None if the request has no constraint.

        Raises:
            InvalidParameter: The constraint cannot be compiled, cannot be fully enforced, or conflicts with another
                parameter.
            GenerationFailed, Overloaded, EngineDead: as `GrammarTrials.trial`.
        """
        constraint = sampling.constraint
        if constraint is None:
            return None
        outputs = StructuredOutputsParams(**constraint.for_vllm())
        if not constraint.as_is:
            outputs.disable_any_whitespace = not constraint.any_whitespace
        return await self.checked(constraint.parameter, outputs, sampling, [SchemaPart(strict=constraint.strict)])

    async def checked(
        self,
        parameter: str,
        outputs: StructuredOutputsParams,
        sampling: SamplingParameters | SamplingParams,
        parts: Sequence[SchemaPart],
    ) -> CheckedConstraint:
        """Check the structured outputs of a request, and return them as the engine enforces them.

        Args:
            parameter: The client's name for the structured outputs.
            outputs: The structured outputs.
            sampling: The request's sampling parameters.
            parts: The parts of the JSON schema.

        Raises:
            InvalidParameter: The structured outputs would harm the engine, would not be enforced, or conflict with
                another parameter.
            GenerationFailed, Overloaded, EngineDead: as `GrammarTrials.trial`.
        """
        # The constraint may at some point allow only the end token, which these parameters forbid.
        if sampling.min_tokens > 0:
            raise InvalidParameter(parameter, "cannot be used together with a minimum of new tokens")
        if sampling.ignore_eos:
            raise InvalidParameter(parameter, "cannot be used together with `ignore_eos`")
        # `guidance` allows any text between structural tags, even a tag whose content violates the tag's schema.
        if self._guidance and outputs.structural_tag is not None:
            raise InvalidParameter(f"{parameter}.structural_tag", _NO_TAGS)
        compact = self._compact or outputs.disable_any_whitespace
        if self._guidance and outputs.json_object:
            # Without a schema, the back end ignores the request's white-space option, and uses the engine's option.
            outputs = dataclasses.replace(outputs, json={"type": "object"}, json_object=None)
        for kind, most in _MOST_CHARACTERS.items():  # At most one kind is set.
            if (value := getattr(outputs, kind)) is None:
                continue
            if not value and kind == "choice":
                raise InvalidParameter(parameter, "must have at least one choice")
            text = value if isinstance(value, str) else _written(parameter, value)
            # Only a trial removes the descriptions from a schema. Without a trial, the lower limit applies.
            _check_size(parameter, text, _MAX_CHARACTERS if kind == "json" and self._trials is None else most)
            if self._trials is None:
                continue
            trial = await self._trials.trial(kind, text, compact=compact)
            # If only the type is enforced, vLLM cannot parse tool calls from the answer.
            has_no_calls = trial.not_held == (WHOLE,) and [part.place for part in parts] != [WHOLE]
            if trial.error and (has_no_calls or not trial.text):
                raise InvalidParameter(parameter, f"cannot be used as a constraint: {_shortened(trial.error)}")
            not_held = self._allowed(parameter, trial, parts) if trial.not_held else ()
            outputs = tried(outputs, **{kind: trial.text if kind != "choice" else value})
            return CheckedConstraint(outputs, text, not_held)
        return CheckedConstraint(outputs)

    def _allowed(self, parameter: str, trial: Trial, parts: Sequence[SchemaPart]) -> tuple[str, ...]:
        """Return the places that the engine does not enforce, as locations in the client's body (`SchemaPart.name`).

        Raises:
            InvalidParameter: One of these places must be enforced.
        """
        found = _named(trial.not_held, parts)
        refused = [(part, place) for part, place in found if part.strict or (part.strict is None and not self._partial)]
        if not refused:
            return tuple(dict.fromkeys([place for _, place in found]))
        name, strict = refused[0][0].name.partition("#")[0], refused[0][0].strict
        places = [place for part, place in refused if part.name.partition("#")[0] == name]
        why = _shortened(trial.error) if trial.error else _listed(places)
        advice = _WITHOUT_STRICT if strict else _WITH_OPTION
        raise InvalidParameter(name or parameter, f"cannot be held whole: {why}; {advice}")

    def check_answer(self, constraint: CheckedConstraint, statistics: EngineStatistics, answer: str | None) -> None:
        """Queue the check of a finished answer against its whole schema. The verdict is counted later.

        Args:
            constraint: The constraint of the request. A part of its schema is not enforced.
            statistics: Counts the verdict.
            answer: The text of the answer. None if it is unknown.
        """
        assert self._trials is not None
        if answer is None:
            statistics.count_verdict("unchecked")
        else:
            self._trials.check(constraint.text, answer, statistics.count_verdict)

    async def stop(self) -> None:
        if self._trials is not None:
            await self._trials.stop()


def _named(places: Sequence[str], parts: Sequence[SchemaPart]) -> list[tuple[SchemaPart, str]]:
    """Translate places of a schema to the client's names. Return each name with the part that contains the place.

    A place that contains several parts is returned once for each of them. A place outside of all parts keeps its name.
    The client's schema may have many places and many parts. So the time is linear in both, not in their product.
    """
    at = {part.place: part for part in parts}
    above: dict[str, list[SchemaPart]] = {}
    deepest = 0
    for part in parts:
        steps = part.place.split("/")
        deepest = max(deepest, len(steps))
        for count in range(1, len(steps)):
            above.setdefault("/".join(steps[:count]), []).append(part)
    found: dict[tuple[SchemaPart, str], None] = {}
    for place in dict.fromkeys(places):
        steps = place.split("/", deepest)[:deepest]
        beginnings = ["/".join(steps[: count + 1]) for count in range(len(steps))]
        named = [(at[each], at[each].name + place[len(each) :]) for each in beginnings if each in at]
        named += [(part, part.name) for part in above.get(place, ())]
        found |= dict.fromkeys(named or [(SchemaPart(), place)])
    return list(found)


def _listed(places: Sequence[str]) -> str:
    """Return the keywords at these places, shortened for an error message."""
    shown = [
        place[:_PLACE_CHARACTERS]
        if place.endswith("#")
        else f"{place.rpartition('/')[2]} ({place[:_PLACE_CHARACTERS]})"
        for place in places[:_SHOWN_PLACES]
    ]
    rest = len(places) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def no_token_left(sampling: SamplingParameters | SamplingParams) -> InvalidParameter | None:
    """Return the error for a failed request if one of its parameters may be the cause. Otherwise return None.

    The parameter may forbid every token that the constraint allows.
    """
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
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidParameter(parameter, "is nested too deeply") from None


def _shortened(error: str) -> str:
    line = next((line for line in error.splitlines() if line.strip()), "it is not understood").strip()
    return line if len(line) <= _ERROR_CHARACTERS else line[:_ERROR_CHARACTERS] + "…"
