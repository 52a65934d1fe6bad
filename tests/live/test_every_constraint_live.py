"""Whatever constrains the text is enforced or refused by its name, on every route of every contract."""

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
from tests.live.constraint_cases import BESIDE, BIASED_END, COMPLETIONS, ENFORCED, REFUSED, ROUTES
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


@pytest.mark.long
@pytest.mark.parametrize("name", ROUTES)
def test_nothing_holds_an_answer_to_these_forms_by_itself(server: Server, name: str) -> None:
    response, text = answer(server, ROUTES[name], {})
    assert response.status_code == 200, response.text
    obeyed = [form for form, (_, check) in ENFORCED[name].items() if check(text)]
    assert obeyed in ([], ["min_tokens"], ["min_tokens", "min_new_tokens"]), text


@pytest.mark.parametrize("name", [*OPENAI, *LMI, *VLLM_NAMES])
def test_plain_text_is_no_constraint(server: Server, name: str) -> None:
    _, text = answer(server, ROUTES[name], {})
    assert answer(server, ROUTES[name], {"response_format": typed("text")})[1] == text != ""


@pytest.mark.parametrize("name", ROUTES)
def test_what_is_accepted_is_enforced(server: Server, name: str) -> None:
    wrong = list(disobeyed(server, ROUTES[name], ENFORCED[name]))
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
    """So that `min_tokens` is what makes it go on."""
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
