"""Constraints on the vLLM engine are enforced, and no client's constraint harms the engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.live.constrained_answers import constrained_answers
from tests.live.small_model import prepare_small_model

pytestmark = pytest.mark.slow
POOL = [
    *('a "quoted" word', "back\\slash", "new\nline", "tab\tstop", "carriage\rreturn", "nul\x00", "bell\x07", "\x7f"),
    *(
        "😀",
        "👍🏽",
        "e\u0301",
        "é",
        "\u2028",
        "日本語",
        "\\n",
        "\\u0041",
        "\U0010ffff",
        "}{",
        "%json",
        "/x/",
        "//",
        "#",
    ),
    *("a", "ab", "abc", " lead", "trail ", "root ::= x", "'", "`"),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
}
AMBIGUOUS = 'root ::= e\ne ::= e e | e e e | "a" | ""'


def schema(document: object) -> dict[str, Any]:
    return {"constraint": {"json_schema": json.dumps(document)}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a pool without choices": ({"constraint": {"choice": []}}, "must have at least one choice"),
    "half of a surrogate pair": ({"constraint": {"choice": ["\ud800"]}}, "half of a surrogate pair"),
    "the end token's own text": ({"constraint": {"choice": ["<|im_end|>"]}}, "no text satisfies it"),
    "an open group": ({"constraint": {"regex": "(a"}}, "unclosed group|invalid regex"),
    "a look-ahead": ({"constraint": {"regex": "(?=a)b"}}, "invalid regex"),
    "a NUL": ({"constraint": {"regex": "a\x00"}}, "NUL"),
    "nested repetitions": ({"constraint": {"regex": "(a{1,1000}){1,1000}"}}, "too many alternatives"),
    "100 000 parentheses": ({"constraint": {"regex": "(" * 60_000 + "a" + ")" * 60_000}}, "invalid regex"),
    "a schema that is no JSON": ({"constraint": {"json_schema": "{"}}, "must be a JSON schema"),
    "a schema that is a list": ({"constraint": {"json_schema": "[]"}}, "must be a JSON schema"),
    "a schema of 10 MB": (schema({"enum": ["x" * 10_000_000]}), "at most 1048576 characters"),
    "a schema of 200 kB": (schema({"enum": ["x" * 200_000]}), "more than 131072 characters"),
    "a schema of 5000 levels": ({"constraint": {"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}}, "too deeply"),
    "a schema that refers to itself": (schema({"$ref": "#"}), "no text satisfies it"),
    "a remote reference": (schema({"$ref": "https://example.com/x.json"}), r"#/\$ref"),
    "a missing reference": (schema({"$ref": "#/$defs/x"}), r"#/\$ref"),
    "10 000 properties": (schema({"properties": {f"p{i}": {} for i in range(8000)}}), "too m"),
    "what cannot be enforced": (schema({"items": {"uniqueItems": True}}), "#/items/uniqueItems"),
    "an empty range": (schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    "a grammar without rules": ({"constraint": {"grammar": "nonsense"}}, "cannot be used as a constraint"),
    "a grammar without a text": ({"constraint": {"grammar": "root ::= a\na ::= a"}}, "no text satisfies it"),
    "an ambiguous grammar": ({"constraint": {"grammar": AMBIGUOUS}}, "too ambiguous|too many|too much"),
    "beams": ({"constraint": {"choice": ["a"]}, "request": {"beam_search": 2, "stream": False}}, "beam search"),
    "a minimum": ({"constraint": {"choice": ["a"]}, "sampling": {"min_tokens": 2}}, "minimum of new tokens"),
    "no end": ({"constraint": {"choice": ["a"]}, "sampling": {"ignore_eos": True}}, "ignore_eos"),
}
ANSWERED: dict[str, dict[str, Any]] = {
    **{f"choice {i}": {"constraint": {"choice": [text]}} for i, text in enumerate(POOL)},
    "pool": {"constraint": {"choice": POOL}},
    "duplicates": {"constraint": {"choice": ["yes", "no", "yes"]}},
    "empty": {"constraint": {"choice": [""]}},
    "1000 choices": {"constraint": {"choice": [f"choice {i}" for i in range(1000)]}},
    "long": {"constraint": {"choice": ["ab " * 80, "cd " * 80]}, "sampling": {"max_tokens": 250}},
    "candidates": {"constraint": {"choice": ["red", "blue"]}, "request": {"sequences": 3, "candidates": 3}},
    "greedy": {
        "constraint": {"choice": ["red", "blue"]},
        "sampling": {"temperature": 0.0},
        "request": {"stream": False},
    },
    "schema": schema(SCHEMA),
    "one line": {"constraint": {"json_schema": json.dumps(SCHEMA), "any_whitespace": False}},
    "object": {"constraint": {"json_object": True, "any_whitespace": False}, "sampling": {"max_tokens": 200}},
    "regex": {"constraint": {"regex": r"^\d{3}-\d{4}$"}},
    "grammar": {"constraint": {"grammar": 'root ::= "SELECT " column\ncolumn ::= "a" | "b"'}},
    "stop string": {"constraint": {"choice": ["one two three"]}, "sampling": {"stop": ("two",)}},
    "nothing allowed": {"constraint": {"choice": ["yes"]}, "sampling": {"allowed_token_ids": (500,)}},
    "still there": {"constraint": {"choice": ["yes"]}},
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Return the answers to all cases."""
    cases = {name: case for name, (case, _) in REFUSED.items()} | ANSWERED
    return constrained_answers(prepare_small_model(), cases)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_before_anything_runs(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    assert result["error"] in ("InvalidParameter", "InvalidRequest"), result
    assert re.search(REFUSED[name][1], result["message"]), result["message"]
    assert len(result["message"]) < 400
    assert result["seconds"] < 60, "what is tried out has a limit of its own"


@pytest.mark.parametrize("number", range(len(POOL)))
def test_a_choice_is_written_exactly_whatever_its_characters(results: dict[str, dict[str, Any]], number: int) -> None:
    assert results[f"choice {number}"] == {"texts": [POOL[number]], "reasons": ["eos"]}


@pytest.mark.parametrize("name", ["pool", "duplicates", "empty", "1000 choices", "long", "candidates", "greedy"])
def test_an_answer_from_a_pool_is_one_of_it_and_then_ends(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    assert set(result["texts"]) <= set(ANSWERED[name]["constraint"]["choice"])
    assert len(result["texts"]) == len(result["reasons"]) == (3 if name == "candidates" else 1)
    assert set(result["reasons"]) == {"eos"}


@pytest.mark.parametrize("name", ["schema", "one line"])
def test_an_answer_by_a_schema_is_valid_and_ends(results: dict[str, dict[str, Any]], name: str) -> None:
    import jsonschema

    (text,), reasons = results[name]["texts"], results[name]["reasons"]
    jsonschema.validate(json.loads(text), SCHEMA)
    assert set(json.loads(text)) == {"name", "age"}
    assert reasons == ["eos"]


def test_json_without_white_space_is_compact(results: dict[str, dict[str, Any]]) -> None:
    (text,) = results["one line"]["texts"]
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("object", r"(?s)\{.*", "eos|length"),
        ("regex", r"\d{3}-\d{4}", "eos"),
        ("grammar", "SELECT (a|b)", "eos"),
        ("stop string", "one ", "stop"),
    ],
)
def test_a_text_has_its_form_to_its_end(results: dict[str, dict[str, Any]], name: str, text: str, reason: str) -> None:
    (made,), (ended,) = results[name]["texts"], results[name]["reasons"]
    assert re.fullmatch(text, made)
    assert re.fullmatch(reason, ended)


def test_a_request_whose_parameters_forbid_every_token_fails_alone(results: dict[str, dict[str, Any]]) -> None:
    assert results["nothing allowed"]["error"] == "InvalidParameter"
    assert results["still there"] == {"texts": ["yes"], "reasons": ["eos"]}


def test_others_go_on_meanwhile(results: dict[str, dict[str, Any]]) -> None:
    assert results["others"]["alive"]
    assert results["others"]["longest_wait"] < 10.0  # enough for a busy machine; a stalled engine takes longer
