"""The explanations are in the documentation."""

from __future__ import annotations

import base64
import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from replay.answer import parse
from replay.comparison import compare
from replay.explanations import BY_NAME, EXPLANATIONS, Explanation, explanation_of
from replay.page import section
from replay.request import RecordedRequest, Reply

DOCS = Path(__file__).parents[3] / "docs"


def words(text: str) -> str:
    """Return a text with single spaces, so that line ends do not matter."""
    return " ".join(text.split())


@pytest.mark.parametrize("explanation", EXPLANATIONS, ids=lambda explanation: explanation.name)
def test_the_page_says_what_the_explanation_says(explanation: Explanation) -> None:
    found = words(section(explanation.page, explanation.anchor) or "")
    assert words(explanation.statement) in found
    if explanation.setting is not None:
        assert explanation.setting.partition("=")[0] in words((DOCS / explanation.page).read_text())


def test_each_explanation_has_its_own_name() -> None:
    assert len(BY_NAME) == len(EXPLANATIONS)


def explained(path: str, body: Any, old: tuple[int, Any], new: tuple[int, Any]) -> list[tuple[str, str | None]]:
    """Return the kinds of the differences of two answers, with the names of their explanations."""
    request = RecordedRequest("1", "f:1", "POST", path, (), json.dumps(body).encode())
    before, after = (
        parse(Reply(status, (("content-type", "application/json"),), json.dumps(value).encode()), streams=False)
        for status, value in (old, new)
    )
    found = compare(before, after, greedy=request.greedy).differences
    return [(one.kind.value, explanation_of(request, before, after, one)) for one in found]


NO_STOP = {"inputs": "Hi", "parameters": {"do_sample": False, "stop": [], "watermark": False}}
GENERATED = {"generated_text": " Paris, which lies on the Seine"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "old", "new"),
    [
        ("/generate", NO_STOP, (200, GENERATED), (200, {"generated_text": "@@ garbage"})),
        ("/generate", NO_STOP, (200, GENERATED), (422, {"error": "no", "error_type": "validation"})),
        (
            "/generate",
            {"inputs": "Hi", "parameters": {"do_sample": False, "stop": ["x"]}},
            (200, GENERATED),
            (200, {"generated_text": "garbage"}),
        ),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "text"}}, (200, {}), (400, {"error": "no"})),
        ("/v1/chat/completions", CHAT | {"min_tokens": 0}, (200, {}), (400, {"error": "no"})),
        ("/v1/chat/completions", CHAT, (200, {}), (404, {"detail": "Not Found"})),
        ("/invocations", CHAT, (424, {"error": "no"}), (429, {"error": "no"})),
        (
            "/v1/embeddings",
            {"input": "a"},
            (200, {"data": [{"embedding": [1.0, 0.0] * 20}]}),
            (200, {"data": [{"embedding": [0.0, 1.0] * 20}]}),
        ),
    ],
)
def test_defaults_explain_nothing(path: str, body: Any, old: tuple[int, Any], new: tuple[int, Any]) -> None:
    (difference,) = explained(path, body, old, new)
    assert difference[1] is None


def test_values_that_ask_for_something_explain_a_difference() -> None:
    asks = {"inputs": "Hi", "parameters": {"do_sample": False, "stop": ["which"], "watermark": True}}
    refused = (422, {"error": "no", "error_type": "validation"})
    assert explained("/generate", asks, (200, GENERATED), refused) == [("status", "tgi-watermark")]
    shorter = (200, {"generated_text": " Paris, "})
    assert explained("/generate", asks, (200, GENERATED), shorter) == [("text", "tgi-stop-in-token")]
    zero = {"inputs": "Hi", "parameters": {"best_of": 0}}
    assert explained("/generate", zero, (200, GENERATED), refused) == [("status", "tgi-best-of-zero")]
    unknown = (404, {"error": {"message": "The model `m` does not exist.", "type": "NotFoundError"}})
    assert explained("/v1/chat/completions", CHAT, (200, {}), unknown) == [("status", "openai-unknown-model")]


def test_vectors_in_base64_are_compared_as_vectors() -> None:
    def answer(*numbers: float) -> tuple[int, Any]:
        data = base64.b64encode(array("f", numbers * 20).tobytes()).decode()
        return 200, {"data": [{"embedding": data}]}

    assert explained("/v1/embeddings", {"input": "a"}, answer(1.0, 0.5), answer(1.0, 0.50001)) == []
    assert explained("/v1/embeddings", {"input": "a"}, answer(1.0, 0.0), answer(0.0, 1.0)) == [("number", None)]


def test_small_scores_that_are_swapped_are_a_difference() -> None:
    old, new = (200, [0.00012, 0.0185]), (200, [0.0185, 0.00012])
    assert explained("/similarity", {"inputs": {}}, old, new)
    assert not explained("/similarity", {"inputs": {}}, old, (200, [0.00013, 0.0186]))


def test_nothing_explains_a_failure_of_the_server() -> None:
    pages = [one for one in EXPLANATIONS if re.search(one.new, "503") and re.search(one.old, "200")]
    assert not [one.name for one in pages if "status" in one.kinds]


@pytest.mark.parametrize("explanation", [one for one in EXPLANATIONS if one.fields], ids=lambda one: one.name)
def test_the_pages_name_each_field_that_is_explained(explanation: Explanation) -> None:
    pages = ((explanation.page, explanation.anchor), ("migrating.md", "explained-differences"))
    named = set(re.findall(r"\w+", " ".join(section(*page) or "" for page in pages)))
    assert set(filter(None, explanation.fields)) <= named | {"first", "middle", "last"}


UNKNOWN = "surprising"
"""A field that no page names."""
CHAT_OBJECT: dict[str, Any] = {
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
}
COMPLETION_OBJECT: dict[str, Any] = {
    "object": "text_completion",
    "model": "m",
    "choices": [{"index": 0, "text": "Hello"}],
}
EMBEDDINGS: dict[str, Any] = {"object": "list", "model": "m", "data": [{"index": 0, "embedding": [1.0, 0.0]}]}
ROUTES = {
    "/v1/chat/completions": (CHAT, CHAT_OBJECT),
    "/openai/v1/chat/completions": (CHAT, CHAT_OBJECT),
    "/v1/completions": ({"model": "m", "prompt": "Hi"}, COMPLETION_OBJECT),
    "/v1/embeddings": ({"model": "m", "input": "Hi"}, EMBEDDINGS),
    "/invocations": (CHAT, CHAT_OBJECT),
    "/predictions/m": ({"prompt": "Hi"}, COMPLETION_OBJECT),
    "/generate": ({"inputs": "Hi"}, GENERATED),
    "/v2/models/m/generate": ({"text_input": "Hi"}, {"text_output": "Hello"}),
}


def planted(value: Any, **fields: Any) -> Any:
    """Return a copy with these fields in each object."""
    if isinstance(value, dict):
        return {name: planted(part, **fields) for name, part in value.items()} | fields
    return [planted(part, **fields) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", ROUTES)
def test_a_field_that_no_page_names_is_not_explained(path: str) -> None:
    body, plain = ROUTES[path]
    with_value, with_null = planted(plain, **{UNKNOWN: 1}), planted(plain, **{UNKNOWN: None})
    kinds = set()
    for old, new in ((plain, with_value), (with_value, plain), (plain, with_null), (with_null, plain)):
        for status in (200, 424):
            found = explained(path, body, (status, old), (status, new))
            kinds |= {kind for kind, _ in found}
            assert {name for _, name in found} == {None}, (status, found)
    assert {"extra field", "missing field", "null or absent"} <= kinds


@pytest.mark.parametrize("path", ROUTES)
def test_the_order_of_an_object_that_no_page_names_is_not_explained(path: str) -> None:
    body, plain = ROUTES[path]
    old, new = ({**plain, UNKNOWN: inner} for inner in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert explained(path, body, (200, old), (200, new)) == [("order of fields", None)]


def test_vllms_fields_and_their_order_are_explained_by_the_page_that_names_them() -> None:
    new = {"model": "m", **CHAT_OBJECT, "service_tier": None, "prompt_logprobs": None}
    found = explained("/v1/chat/completions", CHAT, (200, CHAT_OBJECT), (200, new))
    assert {kind for kind, _ in found} == {"null or absent", "order of fields"}
    pages = {BY_NAME[name or ""].page for _, name in found}
    assert pages == {"migrating.md"}
