"""The replies of LMI's dynamic batch, byte for byte. Source: LMI schema v0.31, "Dynamic Batch/Static Batch Schema"."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.request import FinishReason, TokenDelta
from handlers.contract import Exchange
from handlers.lmi.dynamic_batch import LmiDynamicContract
from tests.contracts.exchange import MODEL, call, whole
from tests.settings import configured

PAD = "<pad>"


def parse(document: Any, content_type: str = "application/json", pad_text: str = "", **settings: Any) -> Exchange:
    contract = LmiDynamicContract(configured(MODEL, **settings), pad_text=pad_text)
    return contract.parse(call(document, content_type))


def step(text: str, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(text, finish_reason=finish, last=finish is not None)


def streamed(
    document: Any, *deltas: tuple[int, TokenDelta], streaming: str = "true", pad_text: str = ""
) -> list[bytes]:
    answer = parse(document, enable_streaming=streaming, pad_text=pad_text).answer
    return [answer.feed(prompt, delta) for prompt, delta in deltas]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.data())
def test_any_texts_come_back_as_json_writes_them(prompts: list[str], data: st.DataObject) -> None:
    prompts = [prompt.encode("utf-8", "ignore").decode() or "x" for prompt in prompts]
    answer = parse({"inputs": prompts}).answer
    texts = [data.draw(st.text(st.characters(codec="utf-8"))) for _ in prompts]
    bodies = [answer.feed(index, whole(texts[index])) for index in data.draw(st.permutations(range(len(prompts))))]
    expected = [{"generated_text": prompt + text} for prompt, text in zip(prompts, texts, strict=True)]
    assert bodies[:-1] == [b""] * (len(prompts) - 1)
    assert bodies[-1] == json.dumps(expected, ensure_ascii=False, indent=2, separators=(",", ":")).encode()


def test_what_has_no_effect_here_is_noted() -> None:
    document = {"inputs": "x", "stream": True, "parameters": {"details": True, "no_repeat_ngram_size": 2}}
    exchange = parse(document)
    assert exchange.notes == (
        "parameters without effect: no_repeat_ngram_size, details",
        "fields without effect: stream",
    )
    assert not exchange.requests[0].stream
    assert not exchange.requests[0].want_tokens


@pytest.mark.parametrize(("pad_text", "entry"), [("", b'""'), (PAD, b'"<pad>"')])
def test_a_prompt_that_has_finished_yields_the_pad_tokens_text(pad_text: str, entry: bytes) -> None:
    records = streamed(
        {"inputs": ["one", "two"]},
        (0, step("", FinishReason.EOS)),
        (1, step(" a")),
        (1, step(" b", FinishReason.LENGTH)),
        pad_text=pad_text,
    )
    assert records[1:] == [b'{"outputs": [' + entry + b', " a"]}\n', b'{"outputs": [' + entry + b', " b"]}\n']


@given(
    st.lists(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=5), min_size=1, max_size=4), st.data()
)
def test_entries_of_a_prompt_joined_are_its_text_in_whatever_order_deltas_come(
    texts: list[list[str]], data: st.DataObject
) -> None:
    answer = parse({"inputs": ["x"] * len(texts)}, enable_streaming="true").answer
    waiting = [[*map(step, parts), step("", FinishReason.EOS)] for parts in texts]
    body = b""
    while left := [prompt for prompt, deltas in enumerate(waiting) if deltas]:
        prompt = data.draw(st.sampled_from(left))
        body += answer.feed(prompt, waiting[prompt].pop(0))
    records = [json.loads(line)["outputs"] for line in body.decode().split("\n")[:-1]]
    assert records
    assert all(len(record) == len(texts) for record in records)
    assert ["".join(column) for column in zip(*records, strict=True)] == ["".join(parts) for parts in texts]


def test_stop_strings_of_the_settings_are_added_to_those_of_the_request() -> None:
    config = configured(MODEL, rolling_batch="disable", stop_sequences=("###",))
    exchange = LmiDynamicContract(config).parse(call({"inputs": "x", "parameters": {"stop_sequences": ["a"]}}))
    assert exchange.requests[0].sampling.stop == ("a", "###")
