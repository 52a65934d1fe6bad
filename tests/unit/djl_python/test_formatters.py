from __future__ import annotations

import json
import re
from typing import Any

import pytest

import djl_python.request_io
from djl_python.output_formatter import (
    _json_3p_output_formatter,
    _json_chat_output_formatter,
    _json_output_formatter,
    _jsonlines_3p_output_formatter,
    _jsonlines_chat_output_formatter,
    _jsonlines_output_formatter,
    _sse_chat_output_formatter,
    get_generated_text,
    get_output_formatter,
    output_formatter,
    sse_response_formatter,
    takes_request_output,
)
from djl_python.request_io import RequestOutput, TextGenerationOutput, TextInput, Token

A, JOKE = Token(7, " a", -0.5), Token(9, " joke", -0.25)
TOKENS = '[{"id": 7, "text": " a", "log_prob": -0.5}, {"id": 9, "text": " joke", "log_prob": -0.25}]'


def started(tgi_compat: bool = False, **parameters: Any) -> TextGenerationOutput:
    output = TextGenerationOutput(request_id=1, input=TextInput(input_text="Tell me", parameters=parameters))
    output.input.tgi_compat = tgi_compat
    output.set_next_token(A)
    return output


def finished(tgi_compat: bool = False, reason: str = "length", **parameters: Any) -> TextGenerationOutput:
    output = started(tgi_compat, **parameters)
    output.set_next_token(JOKE, is_last_token=True, finish_reason=reason)
    output.finished = True
    return output


def failed(**parameters: Any) -> TextGenerationOutput:
    output = started(**parameters)
    output.set_next_token(Token(-1, "", -1, True, "no memory"), is_last_token=True, finish_reason="error")
    output.finished = True
    return output


def test_json_is_one_document_at_the_end() -> None:
    assert _json_output_formatter(started()) == ""
    assert _json_output_formatter(finished()) == '{"generated_text": " a joke"}'


def test_json_with_details() -> None:
    assert _json_output_formatter(finished(details=True)) == (
        '{"generated_text": " a joke", "details": {"finish_reason": "length", "generated_tokens": 2, '
        f'"inputs": "Tell me", "tokens": {TOKENS}}}}}'
    )


def test_json_with_the_prompts_tokens_and_alternatives() -> None:
    output = finished(details=True, decoder_input_details=True, top_n_tokens=1)
    output.prompt_tokens_details = [Token(3, "Tell"), Token(4, " me", -2.0)]
    output.set_next_top_tokens([A])
    details = json.loads(_json_output_formatter(output))["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "inputs", "tokens", "prefill", "top_tokens"]
    assert details["prefill"] == [
        {"id": 3, "text": "Tell", "log_prob": None},
        {"id": 4, "text": " me", "log_prob": -2.0},
    ]
    assert details["top_tokens"] == [[{"id": 7, "text": " a", "log_prob": -0.5}]]


def test_json_for_tgi_clients_is_an_array_with_details_unless_they_are_turned_off() -> None:
    assert _json_output_formatter(finished(tgi_compat=True)) == (
        '[{"generated_text": " a joke", "details": {"finish_reason": "length", "generated_tokens": 2, '
        '"inputs": "Tell me", "tokens": [{"id": 7, "text": " a", "logprob": -0.5}, '
        '{"id": 9, "text": " joke", "logprob": -0.25}]}}]'
    )
    assert _json_output_formatter(finished(tgi_compat=True, details=False)) == '[{"generated_text": " a joke"}]'


def test_the_full_text_begins_with_the_prompt_and_is_not_escaped() -> None:
    output = finished(return_full_text=True)
    output.input.input_text = 'Sag "grüß"\n'
    expected = '{"generated_text": "Sag \\"grüß\\"\\n a joke"}'
    assert _json_output_formatter(output) == expected
    assert get_generated_text(output.best_sequence, output) == 'Sag "grüß"\n a joke'


def test_several_sequences_come_at_the_end_with_the_best_one_first() -> None:
    output = started(best_of=2)
    output.set_next_token(Token(5, " story", -1.0), 1, is_last_token=True, finish_reason="eos_token")
    assert _json_output_formatter(output) == ""
    output.set_next_token(JOKE, is_last_token=True, finish_reason="length")
    output.finished, output.best_sequence_index, output.other_sequences_indices = True, 1, [0]
    assert _json_output_formatter(output) == (
        '{"generated_text": " story", "details": {"inputs": "Tell me", "finish_reason": "eos_token", '
        '"generated_tokens": 1, "tokens": [{"id": 5, "text": " story", "log_prob": -1.0}], "best_of_sequences": '
        f'[{{"finish_reason": "length", "generated_tokens": 2, "tokens": {TOKENS}, "generated_text": " a joke"}}]}}}}'
    )


def test_one_sequence_of_several_asked_for_has_no_others() -> None:
    details = json.loads(_json_output_formatter(finished(n=2)))["details"]
    assert list(details) == ["inputs", "finish_reason", "generated_tokens", "tokens"]


def test_json_of_a_failure_has_no_text() -> None:
    assert _json_output_formatter(failed()) == (
        '{"generated_text": null, "error": "no memory", "code": 400, "details": {"finish_reason": "error"}}'
    )
    details = json.loads(_json_output_formatter(failed(details=True)))["details"]
    assert details["tokens"][-1]["error_msg"] == "no memory"
    assert details["generated_tokens"] == 2


def test_json_lines_are_a_record_for_each_token() -> None:
    output = finished()
    assert _jsonlines_output_formatter(output) == '{"token": {"id": 7, "text": " a", "log_prob": -0.5}}\n'
    assert _jsonlines_output_formatter(output) == (
        '{"token": {"id": 9, "text": " joke", "log_prob": -0.25}, "generated_text": " a joke"}\n'
    )
    assert _jsonlines_output_formatter(output) == ""


def test_the_last_json_line_has_the_details() -> None:
    output = finished(details=True)
    _jsonlines_output_formatter(output)
    assert _jsonlines_output_formatter(output) == (
        '{"token": {"id": 9, "text": " joke", "log_prob": -0.25}, "generated_text": " a joke", '
        '"details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "Tell me"}}\n'
    )


def test_the_last_json_line_of_a_failure_says_so() -> None:
    output = failed()
    _jsonlines_output_formatter(output)
    assert _jsonlines_output_formatter(output) == (
        '{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true, "error_msg": "no memory"}, '
        '"generated_text": " a", "details": {"finish_reason": "error"}}\n'
    )


def test_events_are_records_between_data_and_a_blank_line() -> None:
    output = finished(tgi_compat=True)
    assert sse_response_formatter(output) == 'data: {"token": {"id": 7, "text": " a", "logprob": -0.5}}\n\n'
    assert sse_response_formatter(output) == (
        'data: {"token": {"id": 9, "text": " joke", "logprob": -0.25}, "generated_text": " a joke", '
        '"details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "Tell me"}}\n\n'
    )
    assert sse_response_formatter(output) == ""


def without_clock(text: str) -> str:
    return re.sub(r'chatcmpl-\d+", "object": ("[a-z.]+"), "created": \d+', r'ID", "object": \1', text)


LOGPROBS = (
    '{"token": " a", "logprob": -0.5, "bytes": [32, 97], '
    '"top_logprobs": [{"token": %s, "logprob": -0.5, "bytes": [32, 97]}]}'
)


def test_chat_json_is_one_completion_at_the_end() -> None:
    assert _json_chat_output_formatter(started()) == ""
    output = finished(reason="eos_token")
    output.prompt_tokens_details = [Token(1, "Tell"), Token(2, " me")]
    assert without_clock(_json_chat_output_formatter(output)) == (
        '{"id": "ID", "object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", '
        '"content": " a joke"}, "logprobs": null, "finish_reason": "eos_token"}], '
        '"usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}}'
    )


@pytest.mark.parametrize("parameter", ["logprobs", "top_logprobs"])
def test_chat_json_shows_log_probabilities(parameter: str) -> None:
    document = _json_chat_output_formatter(finished(**{parameter: 1}))
    assert f'"logprobs": {{"content": [{LOGPROBS % json.dumps(" a")}, {{"token": " joke"' in document


def test_chat_json_lines_are_a_chunk_for_each_token() -> None:
    output = finished()
    assert without_clock(_jsonlines_chat_output_formatter(output)) == (
        '{"id": "ID", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " a", '
        '"role": "assistant"}, "logprobs": null, "finish_reason": null}]}\n'
    )
    assert without_clock(_jsonlines_chat_output_formatter(output)) == (
        '{"id": "ID", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " joke"}, '
        '"logprobs": null, "finish_reason": "length"}]}\n'
    )
    assert _jsonlines_chat_output_formatter(output) == ""


def test_chat_chunks_have_the_log_probabilities_that_clients_know() -> None:
    chunk = _jsonlines_chat_output_formatter(started(logprobs=True))
    assert f'"logprobs": [{{"content": [{LOGPROBS % "-0.5"}]}}]' in chunk


def test_chat_events_have_one_id_and_end_with_done() -> None:
    output = finished()
    first, second = _sse_chat_output_formatter(output), _sse_chat_output_formatter(output)
    assert first.startswith('data: {"id": "chatcmpl-')
    assert first.endswith("}\n\n")
    assert second.endswith('"finish_reason": "length"}]}\n\ndata: [DONE]\n\n')
    assert first.split(",")[0] == second.split(",")[0]
    assert _sse_chat_output_formatter(output) == ""


def test_a_token_without_text_has_no_bytes() -> None:
    output = TextGenerationOutput(request_id=1, input=TextInput(input_text="", parameters={"logprobs": True}))
    output.set_next_token(Token(2, ""))
    assert (
        json.loads(_jsonlines_chat_output_formatter(output))["choices"][0]["logprobs"][0]["content"][0]["bytes"] is None
    )


def test_bedrock_json_counts_prompt_and_answer() -> None:
    assert _json_3p_output_formatter(started()) == ""
    output = finished()
    output.prompt_tokens_details = [Token(1, "Tell"), Token(2, " me")]
    assert _json_3p_output_formatter(output) == (
        '{"body": {"generation": " a joke", "prompt_token_count": 2, "generation_token_count": 2, '
        '"stop_reason": "length"}, "metering": {"inputTokenCount": 2, "outputTokenCount": 2}, '
        '"content_type": "application/json"}'
    )


def test_bedrock_json_of_a_failure_has_an_error() -> None:
    document = json.loads(_json_3p_output_formatter(failed()))
    assert document["body"] == {
        "generation": None,
        "prompt_token_count": 0,
        "generation_token_count": 0,
        "stop_reason": "error",
    }
    assert document["error"] == {"error_code": 400, "error_msg": "no memory"}


def test_bedrock_records_count_the_prompt_once() -> None:
    output = finished()
    output.input.input_ids = [1, 2, 3]
    assert _jsonlines_3p_output_formatter(output) == (
        '{"body": {"generation": " a", "prompt_token_count": 3, "generation_token_count": 1, "stop_reason": null}, '
        '"metering": {"outputTokenCount": 1, "inputTokenCount": 3}, "content_type": "application/jsonlines"}\n'
    )
    assert _jsonlines_3p_output_formatter(output) == (
        '{"body": {"generation": " joke", "prompt_token_count": null, "generation_token_count": 2, '
        '"stop_reason": "length"}, "metering": {"outputTokenCount": 2}, "content_type": "application/jsonlines"}\n'
    )
    assert _jsonlines_3p_output_formatter(output) == ""


def test_the_last_bedrock_record_of_a_failure_has_an_error() -> None:
    output = failed()
    _jsonlines_3p_output_formatter(output)
    record = json.loads(_jsonlines_3p_output_formatter(output))
    assert record["error"] == {"error_code": 400, "error_msg": "no memory"}


@pytest.mark.parametrize(
    ("name", "stream", "tgi_compat", "formatter", "content_type"),
    [
        ("json", True, False, _json_output_formatter, "application/json"),
        ("jsonlines", True, False, _jsonlines_output_formatter, "application/jsonlines"),
        ("sse", True, False, sse_response_formatter, "text/event-stream"),
        ("json_chat", True, False, _json_chat_output_formatter, "application/json"),
        ("jsonlines_chat", True, False, _jsonlines_chat_output_formatter, "application/jsonlines"),
        ("sse_chat", True, False, _sse_chat_output_formatter, "text/event-stream"),
        ("3p", True, False, _json_3p_output_formatter, "application/json"),
        ("3p_stream", True, False, _jsonlines_3p_output_formatter, "application/jsonlines"),
        (None, False, False, _json_output_formatter, "application/json"),
        (None, True, False, _jsonlines_output_formatter, "application/jsonlines"),
        (None, True, True, sse_response_formatter, "text/event-stream"),
    ],
)
def test_a_formatter_has_a_name_and_the_default_depends_on_streaming_and_the_client(
    name: str | None, stream: bool, tgi_compat: bool, formatter: Any, content_type: str
) -> None:
    assert get_output_formatter(name, stream, tgi_compat) == (formatter, content_type)


def test_an_unknown_name_is_logged_and_the_default_taken(caplog: pytest.LogCaptureFixture) -> None:
    assert get_output_formatter("xml", False, False)[0] is _json_output_formatter
    assert "Unsupported output formatter: xml" in caplog.text


def test_a_function_is_its_own_formatter_and_the_decorator_only_marks_it() -> None:
    @output_formatter
    def mine(output: TextGenerationOutput) -> str:
        return "mine"

    assert mine.is_output_formatter is True  # type: ignore[attr-defined]
    assert get_output_formatter(mine, True, True) == (mine, None)
    assert mine(started()) == "mine"


def with_output(output: TextGenerationOutput, more: int = 0) -> str:
    return ""


def with_text_annotation(output: djl_python.request_io.RequestOutput, more: int = 0) -> str:
    return ""


class Subclass(TextGenerationOutput):
    pass


def with_class_annotation(output: Any, more: int = 0) -> str:
    return ""


with_class_annotation.__annotations__["output"] = Subclass


def with_tokens(token: Token, first: bool, last: bool, details: Any, text: str, request_id: int) -> str:
    return ""


class FormatterObject:
    def __call__(self, output: RequestOutput, more: int = 0) -> str:
        return ""


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (with_output, True),
        (with_text_annotation, True),
        (with_class_annotation, True),
        (FormatterObject(), True),
        (lambda output: "", True),
        (with_tokens, False),
        (lambda token, *others: "", False),
        (lambda token, first, last, details, text, request_id: "", False),
    ],
)
def test_the_kind_of_a_formatter_is_told_by_its_first_parameter(function: Any, takes: bool) -> None:
    assert takes_request_output(function) is takes
