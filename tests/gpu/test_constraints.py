"""Constraints, and Slipway's other additions to vLLM's sampling, on a server with adapters."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.constrained import CLOSED, REGEX
from tests.gpu.conftest import ON_CPU, TOKENS
from tests.live.constrained import obeys
from tests.live.prompts import PROMPTS
from tests.live.server import Server

FORMS: dict[str, Any] = {
    "json": CLOSED,
    "regex": REGEX,
    "choice": ["yes", "no"],
    "grammar": 'root ::= "red" | "blue"',
}
"""The constraints, by vLLM's names."""


@pytest.mark.parametrize("adapter", ["red"] if ON_CPU else ["model", "red"])
def test_texts_obey_their_constraints_in_one_batch_with_free_texts(server: Server, adapter: str) -> None:
    def text(form: dict[str, Any], seed: int) -> str:
        body: dict[str, Any] = {"model": adapter, "messages": [{"role": "user", "content": "Name a city."}]}
        body |= {"structured_outputs": form, "max_tokens": 32} if form else {"max_tokens": TOKENS}
        answer = server.client.post("/v1/chat/completions", json=body | {"temperature": 1.0, "seed": seed})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    forms = [{kind: value} for kind, value in FORMS.items()] * (1 if ON_CPU else 2)
    with ThreadPoolExecutor(2 * len(forms)) as pool:
        free = pool.map(text, [{}] * len(forms), range(len(forms)))
        found = list(pool.map(text, forms, range(len(forms))))
        list(free)
    assert [(form, answer) for form, answer in zip(forms, found, strict=True) if not obeys(form, answer)] == []


def test_a_forced_tool_gets_its_arguments(server: Server) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {**city, "additionalProperties": False}}}
    body = {"model": "model", "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 64, "tools": [tool]}
    forced = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    answer = server.client.post("/v1/chat/completions", json=body | forced)
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_typical_sampling_narrows_the_choice(server: Server) -> None:
    def texts(**parameters: object) -> set[str]:
        sampled = {"do_sample": True, "max_new_tokens": 1} | parameters
        answers = [server.invoke("Once", seed=seed, **sampled) for seed in range(12)]
        return {answer.json()["generated_text"] for answer in answers}

    narrow, wide = texts(typical_p=0.001), texts()
    assert len(wide) > 3
    assert 2 * len(narrow) <= len(wide), "in 16 bits several tokens may be equally typical"


def test_beams_are_found(server: Server) -> None:
    answer = server.invoke(PROMPTS[0], num_beams=3, max_new_tokens=8)
    assert answer.status_code == 200, answer.text
    beams = [answer.json(), *answer.json()["details"]["best_of_sequences"]]
    assert len({beam["generated_text"] for beam in beams}) == 3
