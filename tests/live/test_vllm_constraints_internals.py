"""The conversion of constraints to vLLM's structured outputs, and the process that tries to compile constraints.

The tests start no engine.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.errors import InvalidParameter
from engines.request import Constraint, SamplingParameters, SchemaPart

if TYPE_CHECKING:
    from engines.vllm.constraints.translator import ConstraintTranslator

pytestmark = pytest.mark.asyncio(loop_scope="module")


def translator_of(model: Path, compact: bool) -> ConstraintTranslator:
    from transformers import AutoTokenizer
    from vllm.config import StructuredOutputsConfig

    from engines.vllm.constraints.translator import ConstraintTranslator

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = StructuredOutputsConfig(backend="guidance", disable_any_whitespace=compact)
    return ConstraintTranslator(tokenizer, len(tokenizer), config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def translator(sample_model: Path) -> AsyncIterator[ConstraintTranslator]:
    translator = translator_of(sample_model, compact=False)
    yield translator
    await translator.stop()


async def translated(translator: ConstraintTranslator, **fields: Any) -> Any:
    constraint = Constraint(parameter="guide", **fields)
    held = await translator.structured_outputs(SamplingParameters(constraint=constraint))
    assert held is not None
    assert not held.not_held
    return held.outputs


def of(schema: object) -> dict[str, Any]:
    return {"json_schema": json.dumps(schema)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no choices": ({"choice": ()}, "must have at least one choice"),
    "half of a surrogate pair": ({"choice": ("\ud800",)}, "half of a surrogate pair"),
    "the end token's own text": ({"choice": ("<|im_end|>",)}, "no text satisfies it"),
    "an open group": ({"regex": "(a"}, "unclosed group|invalid regex"),
    "a look-ahead": ({"regex": "(?=a)b"}, "invalid regex"),
    "nested repetitions": ({"regex": "(a{1,1000}){1,1000}"}, "too many alternatives"),
    "60 000 parentheses": ({"regex": "(" * 60_000 + "a" + ")" * 60_000}, "invalid regex"),
    "no JSON": ({"json_schema": "{"}, "must be a JSON schema"),
    "a list": ({"json_schema": "[]"}, "must be a JSON schema"),
    "a schema of 10 MB": (of({"enum": ["x" * 10_000_000]}), "at most 1048576 characters"),
    "a schema of 200 kB": (of({"enum": ["x" * 200_000]}), "more than 131072 characters"),
    "a schema of 5000 levels": ({"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, "too deeply"),
    "a schema that refers to itself": (of({"$ref": "#"}), "no text satisfies it"),
    "a remote reference": (of({"$ref": "https://example.com/x.json"}), r"#/\$ref"),
    "a missing reference": (of({"$ref": "#/$defs/x"}), r"#/\$ref"),
    "8000 properties": (of({"properties": {f"p{i}": {} for i in range(8000)}}), "too m"),
    "what cannot be enforced": (of({"items": {"uniqueItems": True}}), "#/items/uniqueItems"),
    "an empty range": (of({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    "a grammar without rules": ({"grammar": "nonsense"}, "cannot be used as a constraint"),
    "a grammar without a text": ({"grammar": "root ::= a\na ::= a"}, "no text satisfies it"),
    "an ambiguous grammar": (
        {"grammar": 'root ::= e\ne ::= e e | e e e | "a" | ""'},
        "too ambiguous|too many|too much",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_would_harm_the_engine_or_cannot_be_enforced_is_refused(
    translator: ConstraintTranslator, name: str
) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(InvalidParameter, match=message) as refusal:
        await translated(translator, **fields)
    assert len(refusal.value.message) < 400


async def test_json_has_no_white_space_if_the_request_says_so(translator: ConstraintTranslator) -> None:
    flexible = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert json.loads((await translated(translator, json_object=True)).json) == flexible
    compact = await translated(translator, json_object=True, any_whitespace=False)
    assert json.loads(compact.json)["x-guidance"]["item_separator"] == ","
    assert compact.disable_any_whitespace


@pytest.mark.parametrize("as_is", [False, True])
async def test_the_back_end_gets_expressions_and_grammars_in_its_own_form(
    translator: ConstraintTranslator, as_is: bool
) -> None:
    assert (await translated(translator, regex=r"\d+", as_is=as_is)).regex == "[0-9]+"
    limited = "?start: a\na[max_tokens=8]: /\\d*/\n"
    assert "/[0-9]*/" in (await translated(translator, grammar=limited, as_is=as_is)).grammar
    for regex in ("[" * 1000, r"a\b"):
        with pytest.raises(InvalidParameter, match="guide"):
            await translated(translator, regex=regex, as_is=as_is)


@pytest.mark.parametrize(
    ("backend", "option", "compact"),
    [
        ("guidance", "", True),
        ("xgrammar", '{"backend": "xgrammar"}', True),
        ("guidance", '{"disable_any_whitespace": false}', False),
        ("outlines", '{"backend": "outlines"}', False),  # has no such option
    ],
)
async def test_the_engine_writes_no_white_space_unless_its_option_says_otherwise(
    backend: Any, option: str, compact: bool
) -> None:
    from vllm.config import StructuredOutputsConfig

    from engines.vllm.constraints.translator import choose_backend

    config: Any = SimpleNamespace(structured_outputs_config=StructuredOutputsConfig(backend=backend))
    choose_backend(config, option)
    assert config.structured_outputs_config.disable_any_whitespace == compact


async def test_vllm_checks_no_constraint_that_was_tried(
    translator: ConstraintTranslator, sample_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.config import StructuredOutputsConfig
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output import backend_guidance

    from engines.vllm.patches import grammars

    checked: list[Any] = []
    monkeypatch.setattr(backend_guidance, "validate_guidance_grammar", None)
    monkeypatch.setattr(grammars, "validate_guidance_grammar", lambda params, _: checked.append(params))
    grammars.patch_checks()
    model: Any = SimpleNamespace(is_diffusion=False)
    config = StructuredOutputsConfig(backend="guidance")
    tokenizer = AutoTokenizer.from_pretrained(sample_model)
    tried = SamplingParams(structured_outputs=await translated(translator, regex="[0-9]"))
    other = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]"))
    for params in (tried, tried.clone(), other):
        params._validate_structured_outputs(model, config, tokenizer)
        assert params.structured_outputs is not None
        assert params.structured_outputs._backend == "guidance"
    assert checked == [other]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "$ref", "enum", "const", "pattern", "x-guidance", "required"]
            ),
            inner | st.sampled_from(["object", "array", "string", "#", "integer"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=JSON)
async def test_any_schema_is_translated_or_refused(translator: ConstraintTranslator, schema: Any) -> None:
    with contextlib.suppress(InvalidParameter):  # nothing else may come
        assert (await translated(translator, json_schema=json.dumps(schema))).json


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8") | st.sampled_from('()[]{}|*+?\\"^$.:='), max_size=30))
async def test_any_expression_or_grammar_is_translated_or_refused(translator: ConstraintTranslator, text: str) -> None:
    for kind in ("regex", "grammar"):
        with contextlib.suppress(InvalidParameter):  # nothing else may come
            assert await translated(translator, **{kind: text}) is not None


async def test_without_trials_schemas_are_shorter_and_choices_are_not(sample_model: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.config import StructuredOutputsConfig

    from engines.vllm.constraints.translator import ConstraintTranslator

    tokenizer = AutoTokenizer.from_pretrained(sample_model)
    translator = ConstraintTranslator(tokenizer, len(tokenizer), StructuredOutputsConfig(backend="xgrammar"))
    long = "x" * (1 << 18)
    assert (await translated(translator, choice=(long, "y"))).choice == [long, "y"]
    for fields in ({"regex": long}, {"choice": (long * 8, "y")}, {"json_schema": json.dumps({"description": long})}):
        with pytest.raises(InvalidParameter):
            await translated(translator, **fields)


CALLS = "#/items/anyOf/0/properties/parameters", "#/items/anyOf/1/properties/parameters"
ONE = SchemaPart(CALLS[0], "tools[0].parameters#", False)
TWO = SchemaPart(CALLS[1], "tools[2].parameters#", True)
DEFINED = SchemaPart("#/$defs/1", "tools[2].parameters#", True)
OWN, LOOSE, STRICT = SchemaPart(), SchemaPart(strict=False), SchemaPart(strict=True)


async def held(translator: ConstraintTranslator, parts: list[SchemaPart], *places: str, error: str = "") -> Any:
    """Convert a JSON schema. Its trial reports these places as not held."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    from engines.vllm.constraints.trial_process import Trial

    class Trials:
        async def trial(self, *_: Any, **__: Any) -> Trial:
            return Trial(error, "{}" if places else "", places)

    own, translator._trials = translator._trials, Trials()
    try:
        outputs = StructuredOutputsParams(json={"a": 1})
        return await translator.checked("tool_choice", outputs, SamplingParams(), parts)
    finally:
        translator._trials = own


@pytest.mark.parametrize(
    ("parts", "places", "shown"),
    [
        ([LOOSE], ["#/properties/a/contains"], ["#/properties/a/contains"]),
        ([LOOSE], ["#"], ["#"]),
        ([ONE, TWO], [f"{CALLS[0]}/uniqueItems"], ["tools[0].parameters#/uniqueItems"]),
        ([ONE, TWO], [f"{CALLS[0]}"], ["tools[0].parameters#"]),
        ([ONE], ["#/items/anyOf"], ["tools[0].parameters#"]),
    ],
)
async def test_the_parts_that_are_not_held_have_the_clients_names(
    translator: ConstraintTranslator, parts: list[SchemaPart], places: list[str], shown: list[str]
) -> None:
    found = await held(translator, parts, *places)
    assert found.not_held == tuple(shown)
    assert (found.outputs.json, found.text) == ("{}", '{"a": 1}')


@pytest.mark.parametrize(
    ("parts", "places", "parameter", "listed"),
    [
        ([STRICT], ["#/a/contains"], "tool_choice", "contains (#/a/contains)"),
        ([OWN], ["#/a/contains"], "tool_choice", "contains (#/a/contains)"),
        ([ONE, TWO], [f"{CALLS[1]}/not"], "tools[2].parameters", "not (tools[2].parameters#/not)"),
        ([ONE, TWO], [f"{CALLS[0]}/not", "#/items"], "tools[2].parameters", "tools[2].parameters#"),
        ([ONE, TWO], ["#"], "tools[2].parameters", "tools[2].parameters#"),
        ([ONE, DEFINED], ["#/$defs/1/a%20b/not"], "tools[2].parameters", "tools[2].parameters#/a%20b/not"),
        ([ONE], [f"{CALLS[0]}s/not"], "tool_choice", f"not ({CALLS[0]}s/not)"),
        ([ONE, TWO], ["#/maxItems"], "tool_choice", "maxItems (#/maxItems)"),
        ([STRICT], [f"#/{number}" for number in range(7)], "tool_choice", "4 (#/4) and 2 more"),
    ],
)
async def test_what_must_be_held_is_refused_with_its_keyword_and_its_place(
    translator: ConstraintTranslator, parts: list[SchemaPart], places: list[str], parameter: str, listed: str
) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        await held(translator, parts, *places)
    assert refusal.value.parameter == parameter
    assert listed in refusal.value.message
    assert ("`strict`" in refusal.value.message) == (parts[-1].strict is True and places != ["#/maxItems"])
    assert len(refusal.value.message) < 1500


async def test_many_places_of_many_tools_take_little_time(translator: ConstraintTranslator) -> None:
    parts = [SchemaPart(f"#/items/anyOf/{i}/properties/parameters", f"tools[{i}]#", False) for i in range(5000)]
    places = [f"{part.place}{'/a' * 64}" for part in parts]
    began = time.process_time()
    found = await held(translator, parts, *places, "#", "#/items")
    assert time.process_time() - began < 2  # Comparing each place with each tool would take a hundred times as long.
    assert found.not_held[:2] == (f"tools[0]#{'/a' * 64}", f"tools[1]#{'/a' * 64}")
    assert len(found.not_held) == 10_000


async def test_a_schema_of_which_nothing_is_held_is_refused_unless_its_type_is_enough(
    translator: ConstraintTranslator,
) -> None:
    assert (await held(translator, [LOOSE], "#", error="too large")).not_held == ("#",)
    assert (await held(translator, [ONE], f"{CALLS[0]}/not", error="no text")).not_held == ("tools[0].parameters#/not",)
    for parts in ([STRICT], [OWN], [ONE]):  # vLLM cannot make calls from an arbitrary array.
        with pytest.raises(InvalidParameter, match="too large"):
            await held(translator, parts, "#", error="too large")
    with pytest.raises(InvalidParameter, match="no schema"):
        await held(translator, [LOOSE], error="no schema")


async def test_the_setting_speaks_for_contracts_without_strict(
    translator: ConstraintTranslator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translator, "_partial", True)
    assert (await held(translator, [OWN], "#/a/contains")).not_held == ("#/a/contains",)
    with pytest.raises(InvalidParameter):
        await held(translator, [STRICT], "#/a/contains")
