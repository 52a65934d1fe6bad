"""LMI's dynamic batch, byte for byte. Source: LMI schema v0.31, "Dynamic Batch/Static Batch Schema"."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import EngineDead, GenerationFailed, InvalidRequest, Overloaded, RequestError
from engines.request import BeamSearch, FinishReason, GenerationRequest, SamplingParameters, TokenDelta
from engines.settings.engine_config import Streaming
from handlers.contract import Call, ContractError, Exchange, Reply
from handlers.lmi.dynamic_batch import LmiDynamicContract
from tests.contracts.exchange import MODEL, call, whole
from tests.settings import configured

PAD = "<pad>"


def parse(document: Any, content_type: str = "application/json", pad_text: str = "", **settings: Any) -> Exchange:
    contract = LmiDynamicContract(configured(MODEL, **settings), pad_text=pad_text)
    return contract.parse(call(document, content_type))


def refusal(document: Any, content_type: str = "application/json", **settings: Any) -> Reply:
    with pytest.raises(ContractError) as caught:
        parse(document, content_type, **settings)
    return caught.value.reply


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


# Answers.


def test_the_answer_to_one_string_is_an_array_of_one_text_with_the_prompt_in_front() -> None:
    answer = parse({"inputs": "Tell me"}).answer
    assert answer.content_type == "application/json"
    assert answer.feed(0, whole(" a joke")) == b'[\n  {\n    "generated_text":"Tell me a joke"\n  }\n]'


def test_an_array_of_prompts_is_answered_in_order_when_all_have_finished() -> None:
    answer = parse({"inputs": ["one", "two"]}).answer
    assert answer.feed(1, whole(" 2")) == b""
    assert answer.feed(0, whole(" 1")) == (
        b'[\n  {\n    "generated_text":"one 1"\n  },\n  {\n    "generated_text":"two 2"\n  }\n]'
    )


def test_only_an_explicit_false_leaves_the_prompt_out() -> None:
    texts = {}
    for value in (None, True, False):
        body = parse(with_parameters(return_full_text=value)).answer.feed(0, whole(" a joke"))
        texts[value] = json.loads(body)[0]["generated_text"]
    assert texts == {None: "Tell me a joke", True: "Tell me a joke", False: " a joke"}


def test_text_is_escaped_only_where_json_needs_it() -> None:
    body = parse({"inputs": "你好"}).answer.feed(0, whole(' 😀 <b> "x"\n\x01/'))
    assert body == '[\n  {\n    "generated_text":"你好 😀 <b> \\"x\\"\\n\\u0001/"\n  }\n]'.encode()


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.data())
def test_any_texts_come_back_as_json_writes_them(prompts: list[str], data: st.DataObject) -> None:
    prompts = [prompt.encode("utf-8", "ignore").decode() or "x" for prompt in prompts]
    answer = parse({"inputs": prompts}).answer
    texts = [data.draw(st.text(st.characters(codec="utf-8"))) for _ in prompts]
    bodies = [answer.feed(index, whole(texts[index])) for index in data.draw(st.permutations(range(len(prompts))))]
    expected = [{"generated_text": prompt + text} for prompt, text in zip(prompts, texts, strict=True)]
    assert bodies[:-1] == [b""] * (len(prompts) - 1)
    assert bodies[-1] == json.dumps(expected, ensure_ascii=False, indent=2, separators=(",", ":")).encode()


def test_several_sequences_show_the_most_probable() -> None:
    answer = parse(with_parameters(num_beams=2)).answer
    assert answer.feed(0, whole(" best", sequence=0, last=False)) == b""
    assert b"Tell me best" in answer.feed(0, whole(" other", sequence=1))


# Requests.


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


# Errors.


def e3(message: str, code: int = 424) -> bytes:
    return f'{{\n  "code":{code},\n  "message":"invoke handler failure",\n  "error":"{message}"\n}}'.encode()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "`inputs` is missing; expected a string or an array of strings"),
        ({"inputs": None}, "`inputs` is missing; expected a string or an array of strings"),
        ({"inputs": 3}, "`inputs` must be a string or an array of strings, got a number"),
        ({"inputs": {"a": 1}}, "`inputs` must be a string or an array of strings, got an object"),
        ({"inputs": []}, "`inputs` must hold at least one string"),
        ({"inputs": ["a", 1]}, "`inputs` must hold strings only, got a number"),
        ({"inputs": ["a", None]}, "`inputs` must hold strings only, got null"),
        ({"inputs": ["a", ["b"]]}, "`inputs` must hold strings only, got an array"),
        ({"inputs": ["a", ""]}, "`inputs` must not be empty"),
        ({"inputs": ""}, "`inputs` must not be empty"),
        ({"inputs": "a", "parameters": []}, "`parameters` must be an object, got an array"),
        ({"inputs": "a", "parameters": True}, "`parameters` must be an object, got a boolean"),
        ({"inputs": "a", "parameters": {"top_p": 2}}, "`top_p` must be at most 1, got 2.0"),
        ({"inputs": "a", "parameters": {"return_full_text": 1}}, "`return_full_text` must be true or false, got 1"),
        ({"inputs": "a", "parameters": {"manual_seed": True}}, "`manual_seed` must be a whole number, got true"),
        (["a"], "the body must be a JSON object with `inputs`, got an array"),
        (b"<a>", "the body is not valid JSON: JSON is malformed: invalid character (byte 0)"),
    ],
)
def test_what_cannot_be_understood_is_424_with_lmis_object(document: Any, message: str) -> None:
    reply = refusal(document)
    assert (reply.status, reply.content_type, reply.body) == (424, "application/json", e3(message))


def test_beam_search_cannot_be_streamed() -> None:
    reply = refusal(with_parameters(num_beams=2), enable_streaming="true")
    assert reply.body == e3("`num_beams` above 1 cannot be streamed: no token is final before the last")


def test_strict_parameters_refuse_unknown_ones() -> None:
    assert b"`no_repeat_ngram_size`" in refusal(with_parameters(no_repeat_ngram_size=2), strict_parameters=True).body


@pytest.mark.parametrize("streaming", ["false", "true"])
@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (InvalidRequest('too "long"'), 424, e3('too \\"long\\"')),
        (GenerationFailed("it's <broken> 壊"), 424, e3("it's <broken> 壊")),
        (EngineDead("gone"), 500, e3("gone", 500)),
        (
            Overloaded("the queue is full", 429),
            429,
            b'{\n  "code": 429,\n  "type": "WlmCapacityException",\n  "message": "the queue is full"\n}\n',
        ),
    ],
)
def test_a_failure_before_the_first_byte_has_its_status_and_object(
    streaming: Streaming, error: RequestError, status: int, body: bytes
) -> None:
    contract = LmiDynamicContract(replace(MODEL, enable_streaming=streaming))
    answer = contract.parse(Call(body=b'{"inputs":["x"]}', request_id="r")).answer
    reply = answer.fail(error)
    assert (reply.status, reply.content_type, reply.body) == (status, "application/json", body)


# Streams.


def test_a_stream_is_a_record_for_each_step_with_an_entry_for_each_prompt() -> None:
    records = streamed(
        {"inputs": ["one", "two"]},
        (0, step(" a")),
        (1, step(" é")),
        (0, step(" b", FinishReason.LENGTH)),
        (1, step(' "', FinishReason.LENGTH)),
    )
    assert records == [b"", b'{"outputs": [" a", " \\u00e9"]}\n', b"", b'{"outputs": [" b", " \\""]}\n']
    assert parse({"inputs": "x"}, enable_streaming="true").answer.content_type == "application/jsonlines"


def test_a_string_is_streamed_as_a_list_of_one() -> None:
    assert streamed({"inputs": "one"}, (0, step(" a")), (0, step(" b", FinishReason.LENGTH))) == [
        b'{"outputs": [" a"]}\n',
        b'{"outputs": [" b"]}\n',
    ]


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


def test_the_end_of_the_last_prompt_is_no_record_of_its_own() -> None:
    records = streamed({"inputs": "one"}, (0, step(" a")), (0, step("", FinishReason.EOS)), pad_text=PAD)
    assert records == [b'{"outputs": [" a"]}\n', b""]


def test_a_stream_without_any_text_still_has_a_record() -> None:
    assert streamed({"inputs": "one"}, (0, step("", FinishReason.EOS))) == [b'{"outputs": [""]}\n']


def test_a_prompt_that_is_a_step_ahead_does_not_wait_for_one_that_has_nothing_to_show() -> None:
    records = streamed(
        {"inputs": ["one", "two"]},
        (0, step(" a")),
        (0, step(" b")),
        (1, step(" x")),
        (0, step(" c", FinishReason.LENGTH)),
        (1, step(" y", FinishReason.LENGTH)),
    )
    assert records == [
        b"",
        b'{"outputs": [" a", ""]}\n',
        b'{"outputs": [" b", " x"]}\n',
        b"",
        b'{"outputs": [" c", " y"]}\n',
    ]


def test_the_library_streamer_begins_with_the_prompts() -> None:
    document = {"inputs": ["one", "two"]}
    deltas = (0, step(" a", FinishReason.LENGTH)), (1, step(" b", FinishReason.LENGTH))
    expected = b'{"outputs": ["one", "two"]}\n{"outputs": [" a", " b"]}\n'
    assert b"".join(streamed(document, *deltas, streaming="huggingface")) == expected
    without = document | {"parameters": {"return_full_text": False}}
    assert b"".join(streamed(without, *deltas, streaming="huggingface")) == b'{"outputs": [" a", " b"]}\n'


def test_a_failure_in_mid_stream_is_a_last_record_without_outputs() -> None:
    answer = parse({"inputs": ["one", "two"]}, enable_streaming="true").answer
    answer.feed(0, step(" a"))
    assert answer.fail_midway(GenerationFailed("bröken")) == (
        b'{"outputs": [" a", ""]}\n{"code": 424, "message": "invoke handler failure", "error": "br\\u00f6ken"}\n'
    )
    assert answer.fail_midway(EngineDead("gone")) == (
        b'{"code": 500, "message": "invoke handler failure", "error": "gone"}\n'
    )


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
