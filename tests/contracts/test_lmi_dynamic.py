"""LMI's dynamic batch, byte for byte. Source: LMI schema v0.31, "Dynamic Batch/Static Batch Schema"."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.request import BeamSearch, FinishReason, GenerationRequest, SamplingParameters, TokenDelta
from handlers.contract import Exchange
from handlers.lmi.dynamic_batch import LmiDynamicContract
from tests.contracts.exchange import MODEL, call, whole
from tests.settings import configured

PAD = "<pad>"


def parse(document: Any, content_type: str = "application/json", pad_text: str = "", **settings: Any) -> Exchange:
    contract = LmiDynamicContract(configured(MODEL, **settings), pad_text=pad_text)
    return contract.parse(call(document, content_type))


def request_of(document: Any, **settings: Any) -> GenerationRequest:
    return parse(document, **settings).requests[0]


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "Tell me", "parameters": parameters}


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


def test_the_defaults_are_thirty_greedy_tokens_or_fifty_when_streamed() -> None:
    request = request_of({"inputs": "Tell me"})
    assert (request.prompt, request.stream, request.sampling) == ("Tell me", False, SamplingParameters(max_tokens=30))
    request = request_of({"inputs": "Tell me"}, enable_streaming="true")
    assert (request.stream, request.sampling) == (True, SamplingParameters(max_tokens=50))


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_an_explicit_limit_holds(streaming: str) -> None:
    for parameters in ({"max_new_tokens": 7}, {"max_tokens": 7}):
        assert request_of(with_parameters(**parameters), enable_streaming=streaming).sampling.max_tokens == 7


def test_each_prompt_is_a_request_of_its_own_with_the_same_parameters() -> None:
    requests = parse({"inputs": ["a", "b"], "parameters": {"temperature": 0.5, "truncate": 9}}).requests
    assert [(r.request_id, r.prompt, r.truncate_prompt_tokens) for r in requests] == [("r-0", "a", 9), ("r-1", "b", 9)]
    assert requests[0].sampling == requests[1].sampling == SamplingParameters(max_tokens=30, temperature=0.5)


@pytest.mark.parametrize(
    ("parameters", "inferred", "temperature"),
    [
        ({}, True, 0.0),
        ({"top_p": 0.5}, True, 1.0),
        ({"typical_p": 0.5}, True, 1.0),
        ({"top_p": 0.5}, False, 0.0),
        ({"do_sample": True}, False, 1.0),
        ({"do_sample": False, "temperature": 0.5}, True, 0.0),
    ],
)
def test_do_sample_decides_or_is_inferred(parameters: dict[str, Any], inferred: bool, temperature: float) -> None:
    request = request_of(with_parameters(**parameters), do_sample_inferred=inferred)
    assert request.sampling.temperature == temperature


def test_manual_seed_is_another_name_of_seed() -> None:
    assert request_of(with_parameters(manual_seed=7)).sampling.seed == 7
    assert request_of(with_parameters(manual_seed=7, seed=8)).sampling.seed == 8
    assert parse(with_parameters(manual_seed=7), strict_parameters=True).notes == ()


def test_beam_search_and_several_candidates_are_asked_of_the_engine() -> None:
    request = request_of(with_parameters(num_beams=3, length_penalty=0.5, early_stopping=True))
    assert request.beam_search == BeamSearch(width=3, length_penalty=0.5, early_stopping=True)
    request = request_of(with_parameters(best_of=3, do_sample=True))
    assert (request.sequences, request.candidates) == (1, 3)
    request = request_of(with_parameters(n=3, do_sample=True), enable_streaming="true")
    assert (request.sequences, request.candidates) == (1, 1)


def test_what_has_no_effect_here_is_noted() -> None:
    document = {"inputs": "x", "stream": True, "parameters": {"details": True, "no_repeat_ngram_size": 2}}
    exchange = parse(document)
    assert exchange.notes == (
        "parameters without effect: no_repeat_ngram_size, details",
        "fields without effect: stream",
    )
    assert not exchange.requests[0].stream
    assert not exchange.requests[0].want_tokens


def test_text_plain_is_the_prompt_itself() -> None:
    assert [r.prompt for r in parse(b"Tell me", "text/plain").requests] == ["Tell me"]


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
    model = configured(MODEL, rolling_batch="disable", stop_sequences=("###",))
    exchange = LmiDynamicContract(model).parse(call({"inputs": "x", "parameters": {"stop_sequences": ["a"]}}))
    assert exchange.requests[0].sampling.stop == ("a", "###")
