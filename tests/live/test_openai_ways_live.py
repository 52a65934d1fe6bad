"""Common completions and chats get the same answer from Slipway's own contract and from vLLM's serving classes.

Slipway's contract has no field `echo`, and vLLM's default for it is false. If a request has `echo`, vLLM's serving
classes answer it. `OPENAI_EXAMPLES` sets how many requests of each kind are compared.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer

from tests.live.server import Server
from tests.live.small_model import MAX_MODEL_LEN

EXAMPLES = int(os.environ.get("OPENAI_EXAMPLES", "50"))
THOROUGH = settings(
    max_examples=EXAMPLES,
    derandomize="OPENAI_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
END = "2"
"""The token that ends an answer. The small model chooses it only with a bias."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

texts = st.sampled_from(
    [
        "Once upon a time",
        "The capital of France is",
        "你好，世界",
        "Count: 1 2 3",
        "😀 😀",
        "Write a haiku.\n",
        'a "b" \\ c',
    ]
)
token_ids = st.lists(st.integers(0, 49151), min_size=1, max_size=6)
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["red", "green"]}},
    {"structured_outputs": {"regex": "[0-9]{2}"}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    {"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}},
    {"structured_outputs": {"choice": ["a"], "regex": "b"}},
    {"structured_outputs": {"regex": "("}},
]
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["model", "model", "", None, "tgi", "no-such-model"]),
    "stop": st.sampled_from([None, [], " ", "e", [" the", "a"], ["\n"], ["zz", "t"], [""], 5]),
    "seed": st.sampled_from([None, 0, 7, -1, 2**63, "1"]),
    "top_p": st.sampled_from([None, 0.5, 1, 1.5]),
    "min_p": st.sampled_from([None, 0.1, 2]),
    "repetition_penalty": st.sampled_from([None, 1.1, 2, 0]),
    "presence_penalty": st.sampled_from([None, 1, -2.0, 3]),
    "frequency_penalty": st.sampled_from([None, 0.5, "1"]),
    "logit_bias": st.sampled_from(
        [None, {}, {END: 100}, {"11": -100}, {"28": 200.5}, {"x": 1}, {"99999999": 1}, {" 5": 1}]
    ),
    "stop_token_ids": st.sampled_from([None, [], [11, 28, 30], [-1], [10**9]]),
    "allowed_token_ids": st.one_of(st.sampled_from([None, []]), st.lists(st.integers(0, 49151), min_size=1)),
    "bad_words": st.sampled_from([[], [" the", "a"], None]),
    "min_tokens": st.sampled_from([0, 3, 2000, None, -1]),
    "ignore_eos": st.sampled_from([True, False, None]),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "user": st.sampled_from(["someone", None, 1]),
    "unknown": st.just(1),
    "tools": st.sampled_from([None, []]),
}
SAMPLING = st.sampled_from(
    [{"temperature": 0}] * 6
    + [{"temperature": 0.7, "top_k": 1, "n": 2}, {"temperature": 1.0, "top_k": 1, "n": 3, "seed": 3}]
    + [{"temperature": 0, "n": 2}, {"temperature": 3}, {"temperature": "0"}, {"temperature": 0, "n": None}]
)
STREAM = st.sampled_from(
    [{}, {"stream": False}, {"stream": None}, {"stream_options": {"include_usage": True}}]
    + [{"stream": True}] * 3
    + [
        {"stream": True, "stream_options": {"include_usage": usage, "continuous_usage_stats": continuous}}
        for usage in (True, False)
        for continuous in (True, False, None)
    ]
)
MAX_TOKENS = st.sampled_from([1, 2, 5, 12, 12, 12, 0, MAX_MODEL_LEN + 1, 4.0, True])


@st.composite
def common(draw: st.DrawFn) -> dict[str, Any]:
    """Draw fields that both kinds of bodies have. Most bodies have only a few fields, with valid values."""
    body: dict[str, Any] = {"model": "model", **draw(SAMPLING), **draw(STREAM)}
    for name in draw(st.lists(st.sampled_from(sorted(COMMON)), max_size=3, unique=True)):
        body[name] = draw(COMMON[name])
    if draw(st.integers(0, 6)) == 0:
        body |= draw(st.sampled_from(CONSTRAINTS))
    return body


@st.composite
def completions(draw: st.DrawFn) -> dict[str, Any]:
    prompts = [texts, texts, texts, st.lists(texts, max_size=3), token_ids, st.lists(token_ids, min_size=1, max_size=2)]
    odd = st.sampled_from(
        ["", [], "word " * MAX_MODEL_LEN, [49152], [""], None, ["a", 1], [[]], 7, [5] * MAX_MODEL_LEN]
    )
    body = draw(common()) | {"prompt": draw(st.one_of(*prompts, *prompts, odd))}
    if draw(st.booleans()):
        body["max_tokens"] = draw(MAX_TOKENS)
    if draw(st.booleans()):
        body["logprobs"] = draw(st.sampled_from([0, 1, 3, 5, None, -1, 200, True]))
    return body


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts), max_size=2)
    content = st.one_of(texts, texts, parts)
    message = st.builds(
        lambda role, content, more: {"role": role, "content": content} | more,
        st.sampled_from(["user", "assistant", "system"]),
        content,
        st.sampled_from([{}, {}, {"name": "Ann"}, {"name": None}, {"tool_calls": None}, {"refusal": None}]),
    )
    odd = st.sampled_from(
        [
            [],
            "x",
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "oracle", "content": "x"}],
            [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            [{"role": "user", "content": "word " * MAX_MODEL_LEN}],
            [{"role": "user", "content": "hi", "more": 1}],
        ]
    )
    several = st.lists(message, min_size=1, max_size=4)
    body = draw(common()) | {"messages": draw(st.one_of(several, several, several, odd))}
    limit = draw(st.sampled_from(["max_tokens", "max_tokens", "max_completion_tokens"]))
    body[limit] = draw(MAX_TOKENS)
    if draw(st.booleans()):
        body["logprobs"] = draw(st.sampled_from([True, True, True, False, None, 1]))
        body["top_logprobs"] = draw(st.sampled_from([0, 1, 3, None, -1, 200]))
    return body


@THOROUGH
@given(body=completions())
def test_completions_are_the_same_on_both_ways(server: Server, body: dict[str, Any]) -> None:
    _compare(server, COMPLETIONS, body)


@THOROUGH
@given(body=chats())
def test_chats_are_the_same_on_both_ways(server: Server, body: dict[str, Any]) -> None:
    _compare(server, CHAT, body)


@pytest.mark.parametrize("stop", [[], ["zz"]], ids=["no stop", "stop"])
@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": [{"role": "user", "content": "a"}]}), (COMPLETIONS, {"prompt": "a"})]
)
def test_a_token_within_a_character_has_a_record(
    server: Server, small_options: dict[str, Any], path: str, prompt: dict[str, Any], stop: list[str]
) -> None:
    tokenizer = Tokenizer.from_file(str(small_options["model_id"] / "tokenizer.json"))
    begins_a_character = tokenizer.token_to_id("Ã")  # The byte C3.
    body = {"model": "model", "max_tokens": 1, "allowed_token_ids": [begins_a_character], "stream": True, "stop": stop}
    ours, vllms = (_answer(server, path, prompt | body | more) for more in ({}, {"echo": False}))
    assert ours == vllms
    text = server.client.post(path, json=prompt | body | {"max_tokens": 3}).text
    field, count = ("text", 3) if path == COMPLETIONS else ("content", 4)  # A chat's first record has the role.
    assert text.count(f'"{field}":""') == text.count("data: {") == count


def _compare(server: Server, path: str, body: dict[str, Any]) -> None:
    ours, vllms = (_answer(server, path, sent) for sent in (body, body | {"echo": False}))
    assert _same(ours, vllms), f"\nours:  {ours}\nvLLM's: {vllms}"


def _answer(server: Server, path: str, body: dict[str, Any]) -> Any:
    reply = server.client.post(path, json=body, headers={"x-request-id": "one"})
    kind, text = reply.headers["content-type"], reply.text
    return [reply.status_code, kind, _stream(text) if kind.startswith("text/event-stream") else _ordered(text)]


def _ordered(text: str) -> Any:
    """Return a document without its time. Each object becomes an ordered list of its members."""
    return json.loads(text, object_pairs_hook=lambda pairs: [[k, 0 if k == "created" else v] for k, v in pairs])


def _stream(text: str) -> Any:
    """Return a stream in a form that does not depend on the number of tokens in a record."""
    *events, end = text.split("\n\n")
    assert end == ""
    first: list[Any] = []
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        data = event.removeprefix("data: ")
        record = {} if data == "[DONE]" else json.loads(data)
        if not record.get("choices"):
            first.append(data if data == "[DONE]" or "error" in record else _ordered(data))
            continue
        (choice,) = record["choices"]
        seen = choices.setdefault(choice["index"], {"text": "", "logprobs": {}, "shapes": [], "first": [], "last": []})
        if "role" in choice.get("delta", {}):
            seen["first"].append(_ordered(data))
            continue
        seen["text"] += choice["text"] if "text" in choice else choice["delta"]["content"]
        for name, values in (choice["logprobs"] or {}).items():
            seen["logprobs"].setdefault(name, []).extend(values)
        if "usage" in record:
            counts = record["usage"]
            assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
        if choice["finish_reason"] is None:
            if (shape := _shape(_ordered(data))) not in seen["shapes"]:
                seen["shapes"].append(shape)
        else:
            last = [
                choice["finish_reason"],
                choice.get("stop_reason"),
                record.get("usage"),
                record.get("system_fingerprint"),
            ]
            seen["last"].append([_shape(_ordered(data)), last])
    return [first, [choices[index] for index in sorted(choices)]]


def _shape(value: Any) -> Any:
    """Return the fields of a record in their order, with the types of their values."""
    if isinstance(value, list):
        if all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value) and value:
            return [
                [name, _shape(inner) if name not in ("logprobs", "id") else type(inner).__name__]
                for name, inner in value
            ]
        return [_shape(value[0])] if value else []
    return type(value).__name__


def _same(ours: Any, vllms: Any) -> bool:
    if isinstance(ours, float) and isinstance(vllms, float):
        return math.isclose(ours, vllms, rel_tol=1e-3, abs_tol=1e-4)
    if isinstance(ours, dict) and isinstance(vllms, dict):
        return list(ours) == list(vllms) and all(
            # vLLM may have put all tokens into one record. Then the record has no shape to compare.
            _same(ours[name], vllms[name]) or (name == "shapes" and not (ours[name] and vllms[name]))
            for name in ours
        )
    if isinstance(ours, list) and isinstance(vllms, list):
        return len(ours) == len(vllms) and all(map(_same, ours, vllms))
    return bool(ours == vllms)
