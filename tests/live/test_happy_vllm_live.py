"""happy_vllm's routes on a running server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tests.live.server import START_SECONDS, Server
from tests.live.small_model import ENDLESS_COMPLETION
from tests.waiting import wait_until

PROMPT = "The capital of France is"
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6}
# Forms in happy_vllm's notation. The length of their strings and arrays has no limit.
SIMPLE_FORMS: list[dict[str, Any]] = [
    {"is_alive": "boolean", "is_rich": "boolean", "flags": ["boolean"]},
    {"name": "string", "age": "integer", "is_alive": "boolean"},
    {'with "quotes"': "boolean", "back\\slash": "boolean", "new\nline": "boolean", "": "boolean", "年": "integer"},
]


def generate(server: Server, **document: Any) -> dict[str, Any]:
    response = server.client.post("/v1/generate", json=document)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_greedy_answer_is_complete_and_counted(server: Server) -> None:
    answer = generate(server, **GREEDY)
    assert list(answer) == ["responses", "finish_reasons", "usages"]
    assert answer["responses"] == [server.invoke(PROMPT, max_new_tokens=6).json()["generated_text"]]
    assert answer["finish_reasons"] == ["length"]
    assert answer["usages"] == [{"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}]


def test_a_stream_has_cumulative_lines_no_content_type_and_the_plain_answer_at_its_end(server: Server) -> None:
    document = GREEDY | {"prompt_in_response": True}
    with server.client.stream("POST", "/v1/generate_stream", json=document) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    assert response.status_code == 200
    assert "content-type" not in response.headers
    texts = [line["responses"][0] for line in lines]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [line["usages"][0]["completion_tokens"] for line in lines] == list(range(1, 7))
    assert {line["finish_reasons"][0] for line in lines[:-1]} == {"None"}
    assert lines[-1] == generate(server, **document)
    assert lines[-1]["prompt"] == PROMPT


def test_an_aborted_request_ends_with_abort(server: Server) -> None:
    document = ENDLESS_COMPLETION
    headers = {"x-request-id": "to-abort"}
    with server.client.stream("POST", "/v1/generate_stream", json=document, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        response = server.client.post("/v1/abort_request", json={"request_id": "to-abort"})
        assert (response.status_code, response.content) == (200, b"null")
        *_, last = map(json.loads, lines)
    assert last["finish_reasons"] == ["abort"]
    assert 0 < last["usages"][0]["completion_tokens"] < ENDLESS_COMPLETION["max_tokens"]


@pytest.mark.parametrize("fields", [{"n": 2, "temperature": 1.0}, {"use_beam_search": True, "n": 2, "best_of": 2}])
def test_an_aborted_whole_answer_has_what_there_is_of_it(server: Server, fields: dict[str, Any]) -> None:
    document = ENDLESS_COMPLETION | fields
    generate(server, **document | {"max_tokens": 2})  # the first call of its kind may take long
    with ThreadPoolExecutor() as pool:
        headers, before = {"x-request-id": "whole-to-abort"}, server.metric("slipway_generated_tokens_total")
        answer = pool.submit(server.client.post, "/v1/generate", json=document, headers=headers, timeout=START_SECONDS)
        wait_until(lambda: server.metric("slipway_generated_tokens_total") > before + 10)
        while not answer.done():
            server.client.post("/v1/abort_request", json={"request_id": "whole-to-abort"})
        given = answer.result()
    assert given.status_code == 200
    body = given.json()
    assert set(body["finish_reasons"]) == {"abort"}
    assert all(body["responses"])
    for usage in body["usages"]:
        assert 0 < usage["completion_tokens"] < ENDLESS_COMPLETION["max_tokens"]
        assert usage["prompt_tokens"] > 0


def test_an_answer_of_a_simple_form_has_its_fields_and_types(sample_server: Server) -> None:
    documents: list[dict[str, Any]] = [
        {"prompt": "Describe Ada Lovelace as JSON.\n", "json_format": form, "max_tokens": 300, "temperature": 0}
        for form in SIMPLE_FORMS
    ]
    kinds = {"string": str, "integer": int, "boolean": bool, "number": float}
    with ThreadPoolExecutor(len(documents)) as pool:
        answers = list(pool.map(lambda document: generate(sample_server, **document), documents))
    for document, answer in zip(documents, answers, strict=True):
        assert answer["finish_reasons"] == ["stop"], (document, answer)
        values = json.loads(answer["responses"][0])
        assert list(values) == list(document["json_format"])
        for name, kind in document["json_format"].items():
            items = values[name] if isinstance(kind, list) else [values[name]]
            assert all(isinstance(item, kinds[kind[0] if isinstance(kind, list) else kind]) for item in items)
