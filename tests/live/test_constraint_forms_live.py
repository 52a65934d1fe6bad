"""Each form of constraint is tried on one route, and each route with at least one form. A form that the engine cannot
hold is refused by its name.

tests/contracts/test_constraint_matrix.py has all forms on all routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.constrained import (
    BEAMS,
    CLOSED,
    END,
    ENFORCED,
    NAMES,
    POOL,
    REGEX,
    ROUTES,
    WRONG_FORMS,
    Fields,
    Forms,
    Refused,
    for_each,
    typed,
)
from tests.live.constrained import CHECKED_TOKENS, Checked, accepted, answer, checked, disobeyed
from tests.live.server import Server

PAIR = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
COMPACT: Mapping[str, Fields] = {
    "chat": {"response_format": typed("json_schema", json_schema={"name": "x", "schema": PAIR}), "max_tokens": 40},
    "responses": {"text": {"format": typed("json_schema", name="x", schema=PAIR)}, "max_output_tokens": 40},
    "LMI": {"guided_json": PAIR, "max_new_tokens": 40},
}
"""One schema, as clients of three contracts send it."""


def each_once(cases: Mapping[str, Forms]) -> dict[str, Forms]:
    """Keep each case only for the first route that has it.

    If no case is left for a route, the route keeps its first case.
    """
    seen: set[str] = set()
    chosen: dict[str, Forms] = {}
    for route, own in cases.items():
        new = [name for name in own if name not in seen] or list(own)[:1]
        seen |= own.keys()
        chosen[route] = {name: own[name] for name in new}
    return chosen


ONCE = each_once({name: ENFORCED[name] for name in ROUTES})


@pytest.mark.parametrize("name", ONCE)
def test_a_text_has_the_form_that_is_asked_for(server: Server, name: str) -> None:
    cases = checked(ONCE[name])
    _, text = answer(server, ROUTES[name], {})
    assert text
    assert not any(check(text) for _, check in cases.values()), f"{text!r} has a form that nobody asked for"
    wrong = list(disobeyed(server, ROUTES[name], cases))
    assert not wrong, "\n".join(wrong)


CHARACTERS = [
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
MANY = [f"choice {number}" for number in range(1000)]
LONG = ["ab " * 80, "cd " * 80]


def constrained(server: Server, **fields: Any) -> list[tuple[str, str]]:
    """Return the texts of an LMI request, with their finish reasons. Each token is sampled."""
    parameters = {"do_sample": True, "seed": 1, "max_new_tokens": 64, "details": True, **fields}
    answer = server.invoke("The answer is", **parameters).json()
    details = answer["details"]
    others = [(other["generated_text"], other["finish_reason"]) for other in details.get("best_of_sequences", ())]
    return [(answer["generated_text"], details["finish_reason"]), *others]


def test_a_choice_is_written_exactly_whatever_its_characters(server: Server) -> None:
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda text: constrained(server, guided_choice=[text]), CHARACTERS))
    assert answers == [[(text, "eos_token")] for text in CHARACTERS]


@pytest.mark.parametrize(
    ("pool", "fields"),
    [
        (CHARACTERS, {}),
        (["yes", "no", "yes"], {}),
        (MANY, {}),
        (LONG, {"max_new_tokens": 250}),
        (POOL, {"n": 3}),
        (POOL, {"do_sample": False}),
    ],
    ids=["characters", "duplicates", "many", "long", "candidates", "greedy"],
)
def test_an_answer_from_a_pool_is_one_of_it_and_then_ends(
    server: Server, pool: list[str], fields: dict[str, Any]
) -> None:
    answers = constrained(server, guided_choice=pool, **fields)
    assert len(answers) == fields.get("n", 1)
    assert all(text in pool and reason == "eos_token" for text, reason in answers)


def test_an_empty_choice_ends_the_answer_at_once(server: Server) -> None:
    body = {"prompt": "Hi", "max_tokens": 4, "structured_outputs": {"choice": [""]}}
    (choice,) = server.client.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"guided_regex": r"^\d{3}-\d{4}$"}, r"\d{3}-\d{4}", "eos_token"),
        ({"guided_grammar": 'root ::= "SELECT " column\ncolumn ::= "a" | "b"'}, "SELECT (a|b)", "eos_token"),
        ({"guided_choice": ["one two three"], "stop_sequences": ["two"]}, "one ", "stop_sequence"),
    ],
    ids=["regex", "grammar", "stop string"],
)
def test_a_text_has_its_form_to_its_end(server: Server, fields: dict[str, Any], text: str, reason: str) -> None:
    ((made, ended),) = constrained(server, **fields)
    assert re.fullmatch(text, made)
    assert ended == reason


BIASED_END = {"logit_bias": {str(END): 100}}
OF_TOKENS: Mapping[str, Checked] = {
    "chat": {
        "stop": ({"stop": ["France"]}, lambda text: text != "" and "France" not in text)
    },  # It repeats the question.
    "completions": CHECKED_TOKENS,
    "LMI": {
        "stop_sequences": ({"stop_sequences": ["Par"]}, CHECKED_TOKENS["stop"][1]),
        "min_new_tokens": ({**BIASED_END, "min_new_tokens": 6}, CHECKED_TOKENS["min_tokens"][1]),
    },
    # TGI's texts end with the stop text.
    "generate": {name: ({name: ["Par"]}, lambda text: text == " Par") for name in ("stop", "stop_sequences")},
}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_parameters_that_constrain_tokens_are_enforced(sample_server: Server, name: str) -> None:
    _, text = answer(sample_server, ROUTES[name], {})
    obeyed = {form for form, (_, check) in OF_TOKENS[name].items() if check(text)}
    assert obeyed <= {"min_tokens", "min_new_tokens"}, text
    wrong = list(disobeyed(sample_server, ROUTES[name], OF_TOKENS[name]))
    assert not wrong, "\n".join(wrong)


def test_without_a_minimum_the_bias_ends_the_answer(sample_server: Server) -> None:
    """So the minimum has an effect in the test above."""
    for name in ("completions", "LMI"):
        assert answer(sample_server, ROUTES[name], BIASED_END)[1] == "", name


@pytest.mark.parametrize("name", COMPACT)
def test_json_has_no_white_space_between_its_parts(server: Server, name: str) -> None:
    _, text = answer(server, ROUTES[name], COMPACT[name])
    assert set(json.loads(text)) == {"a", "b"}
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


_TAGS: Refused = {
    name: ({"response_format": typed("structural_tag", **tag)}, "`response_format.structural_tag` is not enforced")
    for name, tag in {
        "a structural tag": {
            "structures": [{"begin": " Paris: ", "schema": CLOSED, "end": "."}],
            "triggers": [" Paris"],
        },
        "a structural tag of the newer kind": {"format": typed("regex", pattern=REGEX)},
    }.items()
}
_TOOL = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
_TOOLS: Refused = {
    "tool_choice: required": (_TOOL | {"tool_choice": "required"}, "tool_choice"),
    "tool_choice: a function": (
        _TOOL | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
    ),
}
_ENDLESS: Refused = {name: WRONG_FORMS[name] for name in ("no end", "a minimum of tokens")}
_SINGLE_TOKENS = ("logit_bias", "bad_words", "allowed_token_ids")
_VLLMS_BEAMS: Refused = {
    f"{name} with beams": (BEAMS | NAMES[name], f"`{name}` cannot be used together with ") for name in _SINGLE_TOKENS
}
_LMIS_BEAMS: Refused = {
    name: ({"num_beams": 2, **NAMES[name]}, f"`{name}` cannot be used together with beam search")
    for name in (*_SINGLE_TOKENS, "guided_choice")
}
REFUSED_BY_ENGINE: dict[str, Refused] = {
    **for_each(("chat", "chat, streamed", "LMI's chat"), {**_TAGS, **_TOOLS}),
    "completions": _TAGS,
    "messages": {
        "tool_choice": (
            {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}},
            "tool_choice",
        )
    },
    "LMI": {**_ENDLESS, **_LMIS_BEAMS, "a NUL": ({"guided_regex": "a\x00"}, "NUL")},
    "LMI, streamed": _ENDLESS,
    **for_each(("happy_vllm", "Triton"), {**_ENDLESS, **_VLLMS_BEAMS}),
}
"""Constraints that the contracts accept. vLLM's front end or the engine then refuses them. The model has no parser of
tool calls.
"""


@pytest.mark.parametrize("name", REFUSED_BY_ENGINE)
def test_what_the_engine_cannot_hold_is_refused_by_its_name(server: Server, name: str) -> None:
    wrong = list(accepted(server, ROUTES[name], REFUSED_BY_ENGINE[name]))
    assert not wrong, "\n".join(wrong)
