"""Golden bytes of happy_vllm's generating routes. Source: happy_vllm, "Generating endpoints"."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.errors import (
    BodyTooLarge,
    EngineDead,
    GenerationFailed,
    InvalidParameter,
    InvalidRequest,
    NotReady,
    NotServed,
    Overloaded,
    RequestError,
    UnknownModel,
)
from engines.request import FinishReason, TokenDelta
from handlers.contract import Call, Exchange, Reply
from handlers.happy_vllm.routes import HAPPY_VLLM
from tests.contracts.exchange import call
from tests.contracts.happy_vllm_exchange import contract

PROMPT = {"prompt": "Tell me"}
EOS, LENGTH = FinishReason.EOS, FinishReason.LENGTH


def parse(document: Any, *, stream: bool = False) -> Exchange:
    return contract(stream=stream).parse(call(document))


def refusal(document: Any) -> Reply:
    with pytest.raises(RequestError) as caught:
        parse(document)
    return HAPPY_VLLM.refuse(caught.value)


def lines(document: Any, *deltas: TokenDelta) -> list[bytes]:
    exchange = parse(document, stream=True)
    return [exchange.answer.feed(0, delta) or exchange.answer.latest() for delta in deltas]


def whole(document: Any, *deltas: TokenDelta) -> bytes:
    exchange = parse(document)
    return b"".join(exchange.answer.feed(0, delta) for delta in deltas)


def delta(text: str, tokens: int, reason: FinishReason | None = None, **fields: Any) -> TokenDelta:
    fields.setdefault("last", reason is not None)
    return TokenDelta(text, prompt_token_count=3, token_count=tokens, finish_reason=reason, **fields)


def test_the_answer_is_compact_with_responses_finish_reasons_and_usages() -> None:
    assert whole(PROMPT, delta(" a joke", 2, LENGTH)) == (
        b'{"responses":[" a joke"],"finish_reasons":["length"],'
        b'"usages":[{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}]}'
    )


def test_the_prompt_is_a_field_of_its_own_and_the_last_one() -> None:
    assert whole(PROMPT | {"prompt_in_response": True}, delta(" a joke", 2, LENGTH)) == (
        b'{"responses":[" a joke"],"finish_reasons":["length"],'
        b'"usages":[{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}],"prompt":"Tell me"}'
    )


def test_the_answer_has_other_scripts_as_they_are() -> None:
    document = {"prompt": "é\n", "prompt_in_response": True}
    assert (
        whole(document, delta('"你好" 🤗\\', 5, EOS))
        == (
            '{"responses":["\\"你好\\" 🤗\\\\"],"finish_reasons":["stop"],'
            '"usages":[{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}],"prompt":"é\\n"}'
        ).encode()
    )


def test_several_sequences_have_an_entry_each_in_every_list() -> None:
    deltas = (delta(" a", 1, LENGTH, last=False), delta(" the joke", 2, EOS, sequence=1))
    assert whole(PROMPT | {"n": 2}, *deltas) == (
        b'{"responses":[" a"," the joke"],"finish_reasons":["length","stop"],"usages":['
        b'{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4},'
        b'{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}]}'
    )


def test_a_stream_is_lines_of_the_whole_text_so_far() -> None:
    assert lines(PROMPT, delta(" moon", 1), delta(" water", 2, LENGTH)) == [
        b'{"responses": [" moon"], "finish_reasons": ["None"], '
        b'"usages": [{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}]}\n',
        b'{"responses": [" moon water"], "finish_reasons": ["length"], '
        b'"usages": [{"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}]}\n',
    ]


def test_a_stream_escapes_what_is_not_ascii() -> None:
    document = {"prompt": "é", "prompt_in_response": True}
    assert lines(document, delta("你🤗\n", 3, EOS)) == [
        b'{"responses": ["\\u4f60\\ud83e\\udd17\\n"], "finish_reasons": ["stop"], '
        b'"usages": [{"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}], "prompt": "\\u00e9"}\n'
    ]


def test_every_line_has_all_sequences() -> None:
    streamed = lines(
        PROMPT | {"n": 2},
        delta(" a", 1),
        delta(" the", 1, sequence=1),
        delta(" joke", 2, EOS, last=False),
        delta(" sun", 2, LENGTH, sequence=1),
    )
    assert [json.loads(line)["responses"] for line in streamed] == [
        [" a", ""],
        [" a", " the"],
        [" a joke", " the"],
        [" a joke", " the sun"],
    ]
    assert [json.loads(line)["finish_reasons"] for line in streamed] == [
        ["None", "None"],
        ["None", "None"],
        ["stop", "None"],
        ["stop", "length"],
    ]
    assert streamed[2] == (
        b'{"responses": [" a joke", " the"], "finish_reasons": ["stop", "None"], "usages": ['
        b'{"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}, '
        b'{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}]}\n'
    )


@pytest.mark.parametrize("extra", [{}, {"prompt_in_response": True}, {"n": 2}])
def test_the_last_line_says_what_the_plain_answer_says(extra: dict[str, Any]) -> None:
    document = {"prompt": "Ünï \U0001f917"} | extra
    deltas = [delta("é", 1), delta(' "🤗"\n', 4, EOS, last="n" not in extra)]
    if "n" in extra:
        deltas.append(delta("other", 1, LENGTH, sequence=1))
    assert json.loads(lines(document, *deltas)[-1]) == json.loads(whole(document, *deltas))


def test_the_lines_are_what_pythons_json_writes() -> None:
    for line in lines(PROMPT | {"n": 2, "prompt_in_response": True}, delta("\x00 \x7f\u2028</script>", 1)):
        assert line == (json.dumps(json.loads(line)) + "\n").encode()


def test_a_stream_has_no_content_type_and_the_plain_answer_has_jsons() -> None:
    assert parse(PROMPT, stream=True).answer.content_type == ""
    assert parse(PROMPT).answer.content_type == "application/json"


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.LENGTH, "length"),
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP, "stop"),
        (FinishReason.ABORT, "abort"),
        (FinishReason.ERROR, "abort"),
    ],
)
def test_finish_reasons_have_vllms_names(reason: FinishReason, name: str) -> None:
    assert json.loads(whole(PROMPT, delta("", 1, reason)))["finish_reasons"] == [name]


def test_without_detokenization_the_texts_are_empty_and_counted() -> None:
    document = PROMPT | {"detokenize": False}
    body = json.loads(whole(document, delta(" a joke", 2, LENGTH)))
    assert (body["responses"], body["usages"][0]["completion_tokens"]) == ([""], 2)


def test_of_a_beam_search_the_best_n_are_shown() -> None:
    document = PROMPT | {"use_beam_search": True, "n": 1, "best_of": 2, "temperature": 0}
    deltas = (delta(" best", 1, EOS, last=False), delta(" second", 1, EOS, sequence=1))
    assert json.loads(whole(document, *deltas))["responses"] == [" best"]
    assert [json.loads(line)["responses"] for line in lines(document, *deltas) if line] == [[" best"]]


def test_a_stream_that_fails_ends_with_a_line_that_says_so() -> None:
    exchange = parse(PROMPT | {"n": 2}, stream=True)
    exchange.answer.feed(0, delta(" a", 1, EOS, last=False))
    assert exchange.answer.fail_midway(GenerationFailed("the disk is full")) == (
        b'{"responses": [" a", ""], "finish_reasons": ["stop", "abort"], "usages": ['
        b'{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}, '
        b'{"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}], "error": "the disk is full"}\n'
    )


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (InvalidRequest("too long"), 422, b'{"detail":"too long"}'),
        (
            InvalidParameter("top_k", "must be less"),
            422,
            b'{"detail":[{"type":"value_error","loc":["body","top_k"],"msg":"`top_k` must be less"}]}',
        ),
        (UnknownModel("x", "no model x"), 404, b'{"detail":"no model x"}'),
        (NotServed("not here"), 404, b'{"detail":"not here"}'),
        (BodyTooLarge("too large"), 413, b'{"detail":"too large"}'),
        (NotReady("loading"), 503, b'{"detail":"loading"}'),
        (Overloaded("full"), 503, b'{"detail":"full"}'),
        (GenerationFailed("gone"), 500, b'{"error":"GenerationFailed","messages":["gone"]}'),
        (EngineDead("dead"), 500, b'{"error":"EngineDead","messages":["dead"]}'),
    ],
)
def test_an_error_before_the_first_byte_has_its_status(error: RequestError, status: int, body: bytes) -> None:
    expected = Reply(status, "application/json", body)
    assert parse(PROMPT).answer.fail(error) == expected
    assert parse(PROMPT, stream=True).answer.fail(error) == expected
    assert HAPPY_VLLM.refuse(error) == expected


def test_another_method_is_refused_as_fastapi_does() -> None:
    reply = HAPPY_VLLM.wrong_method(Call(body=b"", request_id="r"))
    assert reply == Reply(405, "application/json", b'{"detail":"Method Not Allowed"}')


@pytest.mark.parametrize(
    ("document", "body"),
    [
        (b"", b'{"detail":[{"type":"missing","loc":["body"],"msg":"Field required"}]}'),
        (
            b'{"prompt": x}',
            b'{"detail":[{"type":"json_invalid","loc":["body",11],"msg":"JSON decode error",'
            b'"ctx":{"error":"JSON is malformed: invalid character"}}]}',
        ),
        (
            b'{"prompt": "a"',
            b'{"detail":[{"type":"json_invalid","loc":["body",0],"msg":"JSON decode error",'
            b'"ctx":{"error":"Input data was truncated"}}]}',
        ),
        ([1], b'{"detail":[{"type":"dict_type","loc":["body"],"msg":"Input should be a valid dictionary"}]}'),
        ({}, b'{"detail":[{"type":"missing","loc":["body","prompt"],"msg":"Field required"}]}'),
        ({"prompt": None}, b'{"detail":[{"type":"missing","loc":["body","prompt"],"msg":"Field required"}]}'),
        (
            {"prompt": 5},
            b'{"detail":[{"type":"value_error","loc":["body","prompt"],'
            b'"msg":"`prompt` must be a string, got a number"}]}',
        ),
        (
            PROMPT | {"max_tokens": "many"},
            b'{"detail":[{"type":"value_error","loc":["body","max_tokens"],'
            b'"msg":"`max_tokens` must be a whole number, got \\"many\\""}]}',
        ),
        (
            PROMPT | {"temperature": -1},
            b'{"detail":[{"type":"value_error","loc":["body","temperature"],'
            b'"msg":"`temperature` must be at least 0, got -1.0"}]}',
        ),
        (
            PROMPT | {"max_new_tokens": 1},
            b'{"detail":[{"type":"value_error","loc":["body","max_new_tokens"],'
            b'"msg":"`max_new_tokens` is not a sampling parameter that vLLM has"}]}',
        ),
        (
            PROMPT | {"logits_processors": ["x"]},
            b'{"detail":[{"type":"value_error","loc":["body","logits_processors"],'
            b'"msg":"`logits_processors` is not allowed: a request cannot bring code into the engine"}]}',
        ),
        (
            PROMPT | {"response_pool": ["a"], "min_tokens": 1},
            b'{"detail":"`response_pool` cannot be combined with `min_tokens`"}',
        ),
        (
            PROMPT | {"response_pool": ["a"], "json_format": {"a": "string"}},
            b'{"detail":"`response_pool` cannot be combined with `json_format`"}',
        ),
        (
            PROMPT | {"json_format": {"a": "string"}, "guided_decoding": {"regex": "a"}},
            b'{"detail":"`json_format` cannot be combined with `guided_decoding.regex`"}',
        ),
        (
            PROMPT | {"response_pool": "a"},
            b'{"detail":[{"type":"value_error","loc":["body","response_pool"],'
            b'"msg":"`response_pool` must be an array of strings, got a string"}]}',
        ),
        (
            PROMPT | {"response_pool": ["a", ""]},
            b'{"detail":[{"type":"value_error","loc":["body","response_pool"],'
            b'"msg":"`response_pool` must not contain an empty string"}]}',
        ),
        (
            PROMPT | {"json_format": [1]},
            b'{"detail":[{"type":"value_error","loc":["body","json_format"],'
            b'"msg":"`json_format` must be an object, got [1]"}]}',
        ),
        (
            PROMPT | {"json_format": {"a": "text"}},
            b'{"detail":[{"type":"value_error","loc":["body","json_format","a"],"msg":"`json_format.a` must be one of '
            b'\\"string\\", \\"integer\\", \\"boolean\\", \\"number\\", or an array of exactly one of them; '
            b'a JSON schema needs `json_format_is_json_schema` true"}]}',
        ),
        (
            PROMPT | {"json_format_is_json_schema": "maybe"},
            b'{"detail":[{"type":"value_error","loc":["body","json_format_is_json_schema"],'
            b'"msg":"`json_format_is_json_schema` must be true or false, got \\"maybe\\""}]}',
        ),
    ],
)
def test_what_is_wrong_is_refused_with_422_before_anything_is_generated(document: Any, body: bytes) -> None:
    assert refusal(document) == Reply(422, "application/json", body)
