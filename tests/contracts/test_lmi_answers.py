"""Golden bytes for rolling-batch answers of LMI. Source: LMI schema v0.31."""

from __future__ import annotations

import json

import pytest

from engines.errors import EngineDead, GenerationFailed, InvalidRequest, Overloaded
from engines.request import FinishReason, Token
from tests.contracts.exchange import a_joke, answer, parse, whole

PROMPT = {"inputs": "Tell me"}
A, JOKE = Token(7, " a", -0.5), Token(9, " joke", -0.25)
DETAILS = {"parameters": {"details": True}}


def test_json_is_the_text_alone() -> None:
    assert answer(PROMPT, whole(" a joke", A, JOKE)) == b'{"generated_text": " a joke"}'


def test_json_with_details_has_finish_reason_count_inputs_and_tokens() -> None:
    assert answer(PROMPT | DETAILS, whole(" a joke", A, JOKE)) == (
        b'{"generated_text": " a joke", "details": {"finish_reason": "length", "generated_tokens": 2, '
        b'"inputs": "Tell me", "tokens": [{"id": 7, "text": " a", "log_prob": -0.5}, '
        b'{"id": 9, "text": " joke", "log_prob": -0.25}]}}'
    )


def test_jsonlines_is_a_record_for_each_token_and_the_text_on_the_last() -> None:
    assert answer(PROMPT | {"stream": True}, *a_joke()) == (
        b'{"token": {"id": 7, "text": " a", "log_prob": -0.5}}\n'
        b'{"token": {"id": 9, "text": " joke", "log_prob": -0.25}, "generated_text": " a joke"}\n'
    )


def test_jsonlines_with_details_has_them_on_the_last_record_without_tokens() -> None:
    records = answer(PROMPT | DETAILS | {"stream": True}, *a_joke())
    assert records.splitlines(keepends=True)[1] == (
        b'{"token": {"id": 9, "text": " joke", "log_prob": -0.25}, "generated_text": " a joke", '
        b'"details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "Tell me"}}\n'
    )


def test_sse_puts_each_record_into_an_event() -> None:
    assert answer(PROMPT | {"stream": True}, *a_joke(), output_formatter="sse") == (
        b'data: {"token": {"id": 7, "text": " a", "log_prob": -0.5}}\n\n'
        b'data: {"token": {"id": 9, "text": " joke", "log_prob": -0.25}, "generated_text": " a joke"}\n\n'
    )


def test_tgi_compat_wraps_the_answer_in_an_array_with_details_and_tgi_key_names() -> None:
    assert answer(PROMPT, whole(" a joke", A, JOKE), tgi_compat=True) == (
        b'[{"generated_text": " a joke", "details": {"finish_reason": "length", "generated_tokens": 2, '
        b'"inputs": "Tell me", "tokens": [{"id": 7, "text": " a", "logprob": -0.5}, '
        b'{"id": 9, "text": " joke", "logprob": -0.25}]}}]'
    )


def test_tgi_compat_streams_events_with_details_on_the_last() -> None:
    assert answer(PROMPT | {"stream": True}, *a_joke(), tgi_compat=True) == (
        b'data: {"token": {"id": 7, "text": " a", "logprob": -0.5}}\n\n'
        b'data: {"token": {"id": 9, "text": " joke", "logprob": -0.25}, "generated_text": " a joke", '
        b'"details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "Tell me"}}\n\n'
    )


def test_tgi_compat_leaves_details_out_when_the_request_says_so() -> None:
    document = PROMPT | {"parameters": {"details": False}}
    assert answer(document, whole(" a joke"), tgi_compat=True) == b'[{"generated_text": " a joke"}]'


def test_tgi_compat_with_jsonlines_keeps_the_lines() -> None:
    lines = answer(PROMPT | {"stream": True}, *a_joke(), tgi_compat=True, output_formatter="jsonlines")
    assert lines.startswith(b'{"token": {"id": 7, "text": " a", "logprob": -0.5}}\n{"token"')


@pytest.mark.parametrize(
    ("settings", "document", "content_type"),
    [
        ({}, {}, "application/json"),
        ({}, {"stream": True}, "application/jsonlines"),
        ({"output_formatter": "sse"}, {}, "text/event-stream"),
        ({"output_formatter": "json"}, {"stream": True}, "application/json"),
        ({"tgi_compat": True}, {}, "application/json"),
        ({"tgi_compat": True}, {"stream": True}, "text/event-stream"),
        ({"output_formatter": "sse"}, {"parameters": {"output_formatter": "jsonlines"}}, "application/jsonlines"),
        ({}, {"parameters": {"output_formatter": "unheard_of"}}, "application/json"),
    ],
)
def test_the_formatter_is_the_requests_then_the_models_then_by_stream(
    settings: dict[str, object], document: dict[str, object], content_type: str
) -> None:
    assert parse(PROMPT | document, **settings).answer.content_type == content_type


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.LENGTH, b"length"),
        (FinishReason.EOS, b"eos_token"),
        (FinishReason.STOP, b"stop_sequence"),
        (FinishReason.ABORT, b"abort"),
    ],
)
def test_finish_reasons_have_the_schemas_names(reason: FinishReason, name: bytes) -> None:
    body = answer(PROMPT | DETAILS, whole(" a", A, finish_reason=reason))
    assert b'"finish_reason": "' + name + b'"' in body


def test_return_full_text_puts_the_prompt_in_front() -> None:
    document = PROMPT | {"parameters": {"return_full_text": True}}
    assert answer(document, whole(" a joke")) == b'{"generated_text": "Tell me a joke"}'
    stream = answer(document | {"stream": True}, *a_joke())
    assert stream.endswith(b'"generated_text": "Tell me a joke"}\n')


def test_prefill_follows_the_tokens_and_its_first_log_prob_is_null() -> None:
    document = PROMPT | {"parameters": {"details": True, "decoder_input_details": True}}
    delta = whole(" a", A, prompt_tokens=[Token(1, "Tell"), Token(2, " me", -1.5)])
    assert answer(document, delta).endswith(
        b'"tokens": [{"id": 7, "text": " a", "log_prob": -0.5}], '
        b'"prefill": [{"id": 1, "text": "Tell", "log_prob": null}, {"id": 2, "text": " me", "log_prob": -1.5}]}}'
    )


def test_top_tokens_follow_as_a_list_for_each_token() -> None:
    document = PROMPT | {"parameters": {"details": True, "top_n_tokens": 2}}
    token = Token(7, " a", -0.5, top=(A, Token(8, " the", -0.75)))
    assert answer(document, whole(" a", token)).endswith(
        b'"top_tokens": [[{"id": 7, "text": " a", "log_prob": -0.5}, {"id": 8, "text": " the", "log_prob": -0.75}]]}}'
    )


def test_special_tokens_say_so_and_others_do_not() -> None:
    end = Token(2, "", -0.125, special=True)
    assert b'{"id": 2, "text": "", "log_prob": -0.125, "special_token": true}' in answer(
        PROMPT | DETAILS, whole("", end)
    )
    assert b'{"id": 2, "text": "", "logprob": -0.125, "special": true}' in answer(
        PROMPT, whole("", end), tgi_compat=True
    )


def test_several_sequences_show_the_best_and_list_the_others() -> None:
    document = PROMPT | {"parameters": {"n": 2, "do_sample": True}}
    story = whole(" a story", A, Token(5, " story", -1.0), sequence=1)
    joke = whole(" a joke", A, JOKE, sequence=0, last=False, finish_reason=FinishReason.EOS)
    assert answer(document, joke, story) == (
        b'{"generated_text": " a joke", "details": {"inputs": "Tell me", "finish_reason": "eos_token", '
        b'"generated_tokens": 2, "tokens": [{"id": 7, "text": " a", "log_prob": -0.5}, '
        b'{"id": 9, "text": " joke", "log_prob": -0.25}], "best_of_sequences": [{"finish_reason": "length", '
        b'"generated_tokens": 2, "tokens": [{"id": 7, "text": " a", "log_prob": -0.5}, '
        b'{"id": 5, "text": " story", "log_prob": -1.0}], "generated_text": " a story"}]}}'
    )


def test_a_list_of_prompts_gets_a_list_of_answers_in_order() -> None:
    exchange = parse({"inputs": ["one", "two"]})
    assert [request.prompt for request in exchange.requests] == ["one", "two"]
    assert exchange.answer.feed(1, whole(" 2")) == b""
    assert exchange.answer.feed(0, whole(" 1")) == b'[{"generated_text": " 1"}, {"generated_text": " 2"}]'


def test_a_list_of_one_prompt_gets_a_list_of_one_answer() -> None:
    assert answer({"inputs": ["one"]}, whole(" 1")) == b'[{"generated_text": " 1"}]'


def test_several_tokens_of_one_step_are_a_record_each() -> None:
    exchange = parse(PROMPT | {"stream": True})
    both = whole(" a joke", A, JOKE, last=False, finish_reason=None)
    assert exchange.answer.feed(0, both) == (
        b'{"token": {"id": 7, "text": " a", "log_prob": -0.5}}\n'
        b'{"token": {"id": 9, "text": " joke", "log_prob": -0.25}}\n'
    )


def test_a_stream_that_ends_without_a_token_still_has_a_last_record() -> None:
    assert answer(PROMPT | {"stream": True}, whole("")) == (
        b'{"token": {"id": -1, "text": "", "log_prob": null}, "generated_text": ""}\n'
    )


def test_text_is_not_escaped_beyond_what_json_needs() -> None:
    body = answer(PROMPT, whole('你好 😀 "x"\n\t\x01\u2028/'))
    assert body == '{"generated_text": "你好 😀 \\"x\\"\\n\\t\\u0001\u2028/"}'.encode()
    assert json.loads(body)["generated_text"] == '你好 😀 "x"\n\t\x01\u2028/'


def test_log_probs_are_written_in_full_and_minus_infinity_as_null() -> None:
    tokens = (Token(7, " a", -0.052432529628276825), Token(9, " b", float("-inf")))
    body = answer(PROMPT | DETAILS, whole(" a b", *tokens))
    assert b'"log_prob": -0.052432529628276825}' in body
    assert b'"log_prob": null}' in body


JSON_ERROR = (
    b'{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
    b'"tokens": null}, "error": "it broke", "code": 424}'
)
STREAM_ERROR = (
    b'{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true, "error_msg": "it broke"}, '
    b'"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}, '
    b'"error": "it broke", "code": 424}'
)


@pytest.mark.parametrize("error", [GenerationFailed("it broke"), InvalidRequest("it broke")])
def test_a_failure_before_the_first_byte_is_the_schemas_object_under_424(error: GenerationFailed) -> None:
    reply = parse(PROMPT).answer.fail(error)
    assert (reply.status, reply.content_type, reply.body) == (424, "application/json", JSON_ERROR)
    reply = parse(PROMPT | {"stream": True}).answer.fail(error)
    assert (reply.status, reply.content_type, reply.body) == (424, "application/json", STREAM_ERROR)


def test_a_failure_in_mid_stream_is_a_last_record_in_the_streams_framing() -> None:
    error = GenerationFailed("it broke")
    assert parse(PROMPT | {"stream": True}).answer.fail_midway(error) == STREAM_ERROR + b"\n"
    sse = parse(PROMPT | {"stream": True}, output_formatter="sse").answer.fail_midway(error)
    assert sse == b"data: " + STREAM_ERROR + b"\n\n"


def test_a_failure_under_tgi_compat_has_tgis_error_type() -> None:
    assert parse(PROMPT, tgi_compat=True).answer.fail(InvalidRequest("it broke")).body == (
        b'{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        b'"tokens": null}, "error": "it broke", "error_type": "validation", "code": 424}'
    )
    event = parse(PROMPT | {"stream": True}, tgi_compat=True).answer.fail_midway(GenerationFailed("it broke"))
    assert event == (
        b'data: {"token": {"id": -1, "text": "", "logprob": -1, "special": true}, "generated_text": "", '
        b'"details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}, '
        b'"error": "it broke", "error_type": "generation", "code": 424}\n\n'
    )


def test_a_dead_engine_is_500() -> None:
    assert parse(PROMPT).answer.fail(EngineDead()).status == 500


def test_a_full_queue_is_the_front_ends_503() -> None:
    reply = parse(PROMPT).answer.fail(Overloaded("the queue is full"))
    assert (reply.status, reply.body) == (
        503,
        b'{\n  "code": 503,\n  "type": "WlmCapacityException",\n  "message": "the queue is full"\n}\n',
    )
