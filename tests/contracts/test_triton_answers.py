"""Golden bytes of generate responses in Triton's format. Source: Triton 2.68, "Generate Extension"."""

from __future__ import annotations

import json

import pytest

from engines.errors import EngineDead, GenerationFailed, InternalError, InvalidRequest, NotReady, NotServed, Overloaded
from engines.request import FinishReason, Token, TokenDelta
from handlers.triton.errors import SeveralResponses
from tests.contracts.triton_exchange import PROMPT, answered, parse

A, JOKE = Token(7, " a", -0.5, rank=1), Token(9, " joke", -0.25, rank=2)
OUTPUTS = {
    "return_finish_reason": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


def whole(text: str, *tokens: Token, sequence: int = 0, last: bool = True, cumulative: float = -0.75) -> TokenDelta:
    return TokenDelta(
        text,
        list(tokens),
        sequence=sequence,
        finish_reason=FinishReason.LENGTH,
        prompt_token_count=3,
        token_count=len(tokens),
        cumulative_logprob=cumulative,
        last=last,
    )


def steps() -> tuple[TokenDelta, TokenDelta]:
    """Return two engine steps: " a", " joke"."""
    return (
        TokenDelta(" a", [A], prompt_token_count=3, token_count=1, cumulative_logprob=-0.5),
        TokenDelta(
            " joke",
            [JOKE],
            finish_reason=FinishReason.EOS,
            prompt_token_count=3,
            token_count=2,
            cumulative_logprob=-0.75,
            last=True,
        ),
    )


def test_generate_answers_the_recorded_exchange() -> None:
    document = {"id": "42", "text_input": "hello", "parameters": {"max_tokens": 3, "stream": False, "temperature": 0}}
    assert parse(document).answer.content_type == "application/json"
    assert answered(document, whole(" the capital of")) == (
        b'{"id":"42","model_name":"model","model_version":"1","text_output":"hello the capital of"}'
    )


@pytest.mark.parametrize("document", [PROMPT, PROMPT | {"id": ""}, PROMPT | {"parameters": {"id": "7"}}])
def test_without_an_id_at_the_top_there_is_none_in_the_response(document: dict[str, object]) -> None:
    assert answered(document, whole(" world")) == (
        b'{"model_name":"model","model_version":"1","text_output":"hello world"}'
    )


def test_the_prompt_is_left_out_where_the_request_says_so() -> None:
    document = PROMPT | {"parameters": {"exclude_input_in_output": True}}
    assert answered(document, whole(" world")) == b'{"model_name":"model","model_version":"1","text_output":" world"}'


def test_a_stream_is_an_event_for_each_step_with_the_id_and_without_the_prompt() -> None:
    document = {"id": "7", "text_input": "hello", "stream": True}
    exchange = parse(document, "generate_stream")
    assert exchange.answer.content_type == "text/event-stream; charset=utf-8"
    first, second = steps()
    assert exchange.answer.feed(0, first) == (
        b'data: {"id":"7","model_name":"model","model_version":"1","text_output":" a"}\n\n'
    )
    assert exchange.answer.feed(0, second) == (
        b'data: {"id":"7","model_name":"model","model_version":"1","text_output":" joke"}\n\n'
    )


def test_generate_stream_without_stream_is_one_event_with_the_prompt() -> None:
    assert answered(PROMPT, whole(" world"), route="generate_stream") == (
        b'data: {"model_name":"model","model_version":"1","text_output":"hello world"}\n\n'
    )


def test_generate_with_stream_answers_a_model_that_made_one_response() -> None:
    assert answered(PROMPT | {"stream": True}, whole(" world")) == (
        b'{"model_name":"model","model_version":"1","text_output":" world"}'
    )


def test_generate_with_stream_fails_at_the_second_response() -> None:
    answer = parse(PROMPT | {"stream": True}).answer
    first, second = steps()
    assert answer.feed(0, first) == b""
    with pytest.raises(SeveralResponses) as raised:
        answer.feed(0, second)
    reply = answer.fail(raised.value)
    assert (reply.status, reply.content_type) == (400, "application/json")
    assert reply.body == (
        b'{"error":"generate expects model to produce exactly 1 response, use generate stream for model that generates '
        b'various number of responses"}'
    )


def test_all_outputs_stand_in_alphabetical_order() -> None:
    document = PROMPT | OUTPUTS | {"id": "1", "logprobs": 0}
    assert answered(document, whole(" a joke", A, JOKE)) == (
        b'{"cumulative_logprob":-0.75,"finish_reason":"length","id":"1",'
        b'"logprobs":"[{\\"7\\": {\\"logprob\\": -0.5, \\"rank\\": 1, \\"decoded_token\\": \\" a\\"}}, '
        b'{\\"9\\": {\\"logprob\\": -0.25, \\"rank\\": 2, \\"decoded_token\\": \\" joke\\"}}]",'
        b'"model_name":"model","model_version":"1","num_input_tokens":3,"num_output_tokens":2,'
        b'"text_output":"hello a joke"}'
    )


def test_a_streams_outputs_are_those_of_the_new_tokens() -> None:
    document = PROMPT | OUTPUTS | {"stream": True, "logprobs": 0}
    assert answered(document, *steps(), route="generate_stream") == (
        b'data: {"cumulative_logprob":-0.5,"finish_reason":"None",'
        b'"logprobs":"[{\\"7\\": {\\"logprob\\": -0.5, \\"rank\\": 1, \\"decoded_token\\": \\" a\\"}}]",'
        b'"model_name":"model","model_version":"1","num_input_tokens":3,"num_output_tokens":1,"text_output":" a"}\n\n'
        b'data: {"cumulative_logprob":-0.75,"finish_reason":"stop",'
        b'"logprobs":"[{\\"9\\": {\\"logprob\\": -0.25, \\"rank\\": 2, \\"decoded_token\\": \\" joke\\"}}]",'
        b'"model_name":"model","model_version":"1","num_input_tokens":3,"num_output_tokens":1,'
        b'"text_output":" joke"}\n\n'
    )


def test_the_logprobs_output_is_null_in_a_string_without_the_parameter() -> None:
    assert answered(PROMPT | {"return_logprobs": True}, whole(" a", A)) == (
        b'{"logprobs":"null","model_name":"model","model_version":"1","text_output":"hello a"}'
    )


def test_alternatives_follow_the_chosen_token_which_is_not_repeated() -> None:
    top = (Token(8, " the", -0.1, rank=1), Token(7, " a", -0.5, rank=2), Token(5, "\u00e9", float("-inf"), rank=3))
    token = Token(7, " a", -0.5, top=top, rank=2)
    document = PROMPT | {"return_logprobs": True, "parameters": {"logprobs": "3"}}
    assert json.loads(json.loads(answered(document, whole(" a", token)))["logprobs"]) == [
        {
            "7": {"logprob": -0.5, "rank": 2, "decoded_token": " a"},
            "8": {"logprob": -0.1, "rank": 1, "decoded_token": " the"},
            "5": {"logprob": None, "rank": 3, "decoded_token": "\u00e9"},
        }
    ]


def test_the_cumulative_logprob_has_32_bits() -> None:
    document = PROMPT | {"return_cumulative_logprob": True}
    assert answered(document, whole(" a", A, cumulative=-0.7)).startswith(
        b'{"cumulative_logprob":-0.699999988079071,"model_name"'
    )


def test_several_sequences_are_arrays_in_their_order() -> None:
    document = {"text_input": "a b", "max_tokens": 2, "n": 2, "return_finish_reason": True}
    assert answered(document, whole(" the story", sequence=1, last=False), whole(" the capital")) == (
        b'{"finish_reason":["length","length"],"model_name":"model","model_version":"1",'
        b'"text_output":["a b the capital","a b the story"]}'
    )


def test_a_stream_of_several_sequences_has_an_entry_for_each_in_every_event() -> None:
    document = PROMPT | OUTPUTS | {"stream": True, "n": 2, "logprobs": 0}
    deltas = (
        TokenDelta(" a", [A], sequence=1, prompt_token_count=3, token_count=1, cumulative_logprob=-0.5),
        whole(" joke", JOKE, cumulative=-0.25),
    )
    assert answered(document, *deltas, route="generate_stream") == (
        b'data: {"cumulative_logprob":[0.0,-0.5],"finish_reason":["None","None"],'
        b'"logprobs":["[]","[{\\"7\\": {\\"logprob\\": -0.5, \\"rank\\": 1, \\"decoded_token\\": \\" a\\"}}]"],'
        b'"model_name":"model","model_version":"1","num_input_tokens":3,"num_output_tokens":[0,1],'
        b'"text_output":[""," a"]}\n\n'
        b'data: {"cumulative_logprob":[-0.25,-0.5],"finish_reason":["length","None"],'
        b'"logprobs":["[{\\"9\\": {\\"logprob\\": -0.25, \\"rank\\": 2, \\"decoded_token\\": \\" joke\\"}}]","[]"],'
        b'"model_name":"model","model_version":"1","num_input_tokens":3,"num_output_tokens":[1,0],'
        b'"text_output":[" joke",""]}\n\n'
    )


def test_tensorrt_llms_outputs_are_its_own_and_its_text_does_not_repeat_the_prompt() -> None:
    document = PROMPT | {"max_tokens": 2, "bad_words": "", "stop_words": "", "return_log_probs": True}
    assert answered(document, whole(" a joke", A, JOKE)) == (
        b'{"cum_log_probs":-0.75,"model_name":"model","model_version":"1","output_log_probs":[-0.5,-0.25],'
        b'"text_output":" a joke"}'
    )


def test_rows_of_output_log_probs_are_filled_up_to_the_longest() -> None:
    document = PROMPT | {"beam_width": 2, "return_log_probs": True}
    assert answered(document, whole(" a joke", A, JOKE, last=False), whole(" a", A, sequence=1, cumulative=-0.5)) == (
        b'{"cum_log_probs":[-0.75,-0.5],"model_name":"model","model_version":"1",'
        b'"output_log_probs":[-0.5,-0.25,-0.5,0.0],"text_output":[" a joke"," a"]}'
    )


def test_of_more_beams_than_are_asked_for_the_best_are_shown() -> None:
    document = PROMPT | {"beam_width": 2, "num_return_sequences": 1}
    assert answered(document, whole(" joke", last=False), whole(" story", sequence=1)) == (
        b'{"model_name":"model","model_version":"1","text_output":" joke"}'
    )


def test_tensorrt_llms_text_repeats_the_prompt_where_the_request_says_so() -> None:
    document = PROMPT | {"stop_words": [], "exclude_input_in_output": False}
    assert answered(document, whole(" a")) == b'{"model_name":"model","model_version":"1","text_output":"hello a"}'


def test_without_detokenization_there_is_no_text() -> None:
    document = PROMPT | {"detokenize": False, "exclude_input_in_output": True, "return_num_output_tokens": True}
    assert answered(document, whole(" a joke", A, JOKE)) == (
        b'{"model_name":"model","model_version":"1","num_output_tokens":2,"text_output":""}'
    )


def test_text_is_utf_8_and_escaped_no_more_than_json_needs() -> None:
    text = '你好 😀 "x"\n\t</a>\u2028'
    event = answered(PROMPT | {"stream": True}, whole(text), route="generate_stream")
    assert event == (
        'data: {"model_name":"model","model_version":"1","text_output":"你好 😀 \\"x\\"\\n\\t</a>\u2028"}\n\n'.encode()
    )


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidRequest("boom"), 400, b"Error generating stream: boom"),
        (GenerationFailed("boom"), 500, b"Error generating stream: boom"),
        (
            InternalError(),
            500,
            b"Error generating stream: internal error; the log has more under this request's id",
        ),
        (EngineDead(), 500, b"the engine has died; the request was not completed"),
        (Overloaded("the queue is full"), 503, b"the queue is full"),
        (NotReady("the model 'model' is not loaded yet"), 503, b"the model 'model' is not loaded yet"),
        (NotServed("this model has a handler of its own"), 501, b"this model has a handler of its own"),
    ],
)
def test_an_error_as_the_first_response_is_a_json_object_under_an_error_status(
    route: str, error: InvalidRequest, status: int, message: bytes
) -> None:
    reply = parse(PROMPT | {"stream": True}, route).answer.fail(error)
    assert (reply.status, reply.content_type) == (status, "application/json")
    assert reply.body == b'{"error":"' + message + b'"}'


def test_an_error_after_the_first_response_is_an_event() -> None:
    answer = parse(PROMPT | {"stream": True}, "generate_stream").answer
    assert answer.feed(0, steps()[0]) == b'data: {"model_name":"model","model_version":"1","text_output":" a"}\n\n'
    assert answer.fail_midway(GenerationFailed("boom")) == b'data: {"error":"Error generating stream: boom"}\n\n'


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.LENGTH, b"length"),
        (FinishReason.EOS, b"stop"),
        (FinishReason.STOP, b"stop"),
        (FinishReason.ABORT, b"abort"),
    ],
)
def test_finish_reasons_have_vllms_names(reason: FinishReason, name: bytes) -> None:
    delta = TokenDelta(" a", finish_reason=reason, last=True)
    assert b'{"finish_reason":"' + name + b'",' in answered(PROMPT | {"return_finish_reason": True}, delta)
