"""Parameters that constrain the text are enforced or refused by name, on every route of every contract.

tests/live/test_never_ignored_live.py tries the constraints of the whole text on every route. This file tries the
parameters that constrain single tokens. The sample model's text shows their effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import pytest

from tests.live.constrained import (
    LMI,
    OPENAI,
    REGEX,
    RESPONSE,
    VLLM_NAMES,
    Fields,
    Route,
    accepted,
    answer,
    disobeyed,
    typed,
)
from tests.live.constraint_cases import (
    BESIDE,
    BIASED_END,
    COMPLETIONS,
    ENFORCED,
    OF_TOKENS,
    REFUSED,
    ROUTES,
    Enforced,
    each_once,
)
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


@pytest.mark.parametrize("name", ["chat", "LMI", "happy_vllm", "Triton"])
def test_plain_text_is_no_constraint(server: Server, name: str) -> None:
    _, text = answer(server, ROUTES[name], {})
    assert answer(server, ROUTES[name], {"response_format": typed("text")})[1] == text != ""


CASES = {name: {form: case for form, case in ENFORCED[name].items() if form in OF_TOKENS} for name in ROUTES}
ALL = [pytest.param(name, CASES[name], id=f"{name}, all", marks=pytest.mark.long) for name in ROUTES]
DAILY = ("chat", "LMI")  # The other routes are slow.
ONCE = [
    pytest.param(name, cases, id=name, marks=[] if name in DAILY else pytest.mark.slow)
    for name, cases in each_once(CASES).items()
]


@pytest.mark.parametrize(("name", "cases"), [*ONCE, *ALL])
def test_parameters_that_constrain_tokens_are_enforced(sample_server: Server, name: str, cases: Enforced) -> None:
    _, text = answer(sample_server, ROUTES[name], {})
    obeyed = {form for form, (_, check) in cases.items() if check(text)}
    assert obeyed <= {"min_tokens", "min_new_tokens"}, text
    wrong = list(disobeyed(sample_server, ROUTES[name], cases))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", COMPACT)
def test_json_has_no_white_space_between_its_parts(server: Server, name: str) -> None:
    _, text = answer(server, ROUTES[name], COMPACT[name])
    assert set(json.loads(text)) == {"a", "b"}
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


@pytest.mark.parametrize("name", ROUTES)
def test_what_is_not_enforced_is_refused_by_its_name(server: Server, name: str) -> None:
    wrong = list(accepted(server, ROUTES[name], REFUSED[name]))
    assert not wrong, "\n".join(wrong)


def test_a_constraint_beside_inputs_is_refused(server: Server) -> None:
    for path in ("/invocations", "/generate", "/generate_stream", "/"):
        beside = Route(path, lambda fields: {"inputs": "x", **fields}, lambda document: str(document))
        assert list(accepted(server, beside, BESIDE)) == [], path


def test_without_a_minimum_the_bias_ends_the_answer(server: Server) -> None:
    """Shows that the bias ends the answer, so that `min_tokens` has an effect in the other tests."""
    for name in (*COMPLETIONS, *LMI, *VLLM_NAMES):
        _, text = answer(server, ROUTES[name], {"logit_bias": BIASED_END[0]["logit_bias"]})
        assert text == "", name


@pytest.mark.long
@pytest.mark.parametrize("name", [*OPENAI, *RESPONSE])
def test_a_body_that_json_readers_disagree_about_ignores_no_constraint(server: Server, name: str) -> None:
    route = ROUTES[name]
    body = json.dumps(route.body({"guided_regex": REGEX}) | {"unknown": float("nan")})
    plain = body.replace("NaN", "0")
    for sent in (body.encode(), b"\xef\xbb\xbf" + plain.encode(), plain.encode("utf-16")):
        refused = server.client.post(route.path, content=sent, headers={"content-type": "application/json"})
        assert refused.status_code >= 400, refused.text
        assert not re.search(REGEX, refused.text)
