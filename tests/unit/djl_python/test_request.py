from __future__ import annotations

import json
from typing import Any

import pytest

from djl_python.request import Request
from djl_python.request_io import RequestOutput, TextGenerationOutput, TextInput, Token


def request(formatter: Any = None, **parameters: Any) -> Request:
    return Request(TextInput(request_id=3, input_text="Tell me", parameters=parameters, output_formatter=formatter))


def steps(made: Request, *texts: str) -> list[str]:
    """Return the texts that a rolling batch sends after each token."""
    sent = []
    for index, text in enumerate(texts):
        last = index == len(texts) - 1
        made.set_next_token(text, last, "length" if last else None)
        sent.append(made.get_next_token())
        made.reset_next_token()
    return sent


def test_the_engine_does_not_get_what_only_the_answer_is_about() -> None:
    made = request(output_formatter="sse", stream=True, details=True, top_k=3)
    assert made.parameters == {"top_k": 3}
    assert made.request_input.parameters["details"] is True
    assert made.get_content_type() == "text/event-stream"


def test_server_parameters_are_used_where_a_custom_formatter_has_set_them() -> None:
    given = TextInput(input_text="x", parameters={"a": 1}, server_parameters={"b": 2})
    assert Request(given).parameters == {"b": 2}


def test_json_says_everything_once_even_when_it_is_streamed() -> None:
    for stream in (False, True):
        assert steps(request("json", stream=stream), "a", "b") == ["", '{"generated_text": "ab"}']


def test_several_unread_tokens_make_one_document_or_a_record_each() -> None:
    for name, expected in (("json", 1), ("jsonlines", 3), ("sse", 3), ("3p", 1), ("3p_stream", 3), ("json_chat", 1)):
        made = request(name, stream=True)
        for text in "abc":
            made.set_next_token(text, text == "c", "length" if text == "c" else None)
        assert made.get_next_token().count("{") >= expected
        records = [line for line in made.get_next_token().splitlines() if line]
        assert len(records) == expected, name


def test_json_lines_lose_no_token_where_streaming_was_not_asked_for() -> None:
    made = request("jsonlines")
    made.set_next_token("a")
    made.set_next_token("b", True, "length")
    assert [json.loads(line)["token"]["text"] for line in made.get_next_token().splitlines()] == ["a", "b"]


def test_the_text_stays_until_it_is_reset() -> None:
    made = request("jsonlines", stream=True)
    made.set_next_token("a")
    assert made.get_next_token() == made.get_next_token() != ""
    made.reset_next_token()
    assert made.get_next_token() == ""


def test_tokens_know_their_request_and_the_last_one_finishes_it() -> None:
    made = request()
    token = Token(5, "x")
    made.set_next_token(token)
    assert (token.request_id, made.is_last_token(), made.request_output.finished) == (3, False, False)
    made.set_next_token("y", True, "eos_token")
    assert (made.is_last_token(), made.request_output.finished) == (True, True)
    assert made.request_output.best_sequence.finish_reason == "eos_token"


def test_an_error_is_kept_with_its_status() -> None:
    made = request()
    assert (made.get_error_message(), made.get_error_code()) == (None, None)
    made.set_error_message("no memory")
    made.set_error_code(424)
    assert (made.get_error_message(), made.get_error_code()) == ("no memory", 424)


@pytest.mark.parametrize("full", [False, True])
def test_a_legacy_formatter_is_called_with_each_token(full: bool) -> None:
    calls: list[tuple[Any, ...]] = []

    def legacy(token: Token, first_token: bool, last_token: bool, details: dict, text: str, id: int) -> str:  # type: ignore[type-arg]
        calls.append((token.text, first_token, last_token, details, text, id))
        return token.text.upper()

    before = "Tell me" if full else ""
    assert steps(request(legacy, return_full_text=full), "a", "b") == ["A", "B"]
    assert calls == [("a", True, False, {}, before, 3), ("b", False, True, {}, f"{before}ab", 3)]


def test_a_legacy_formatter_gets_details_if_they_are_asked_for() -> None:
    def legacy(token: Token, first_token: bool, last_token: bool, details: Any, text: str, id: int) -> str:
        return json.dumps(details)

    made = request(legacy, details=True)
    made.request_output.prompt_tokens_details = [Token(1, "Tell"), Token(2, " me")]
    first, last = steps(made, "a", "b")
    assert json.loads(first)["finish_reason"] is None
    assert json.loads(last) == {
        "finish_reason": "length",
        "tokens": [{"id": -1, "text": text, "log_prob": None} for text in "ab"],
        "generated_tokens": 2,
        "inputs": "Tell me",
        "parameters": {"details": True},
        "prompt_tokens": 2,
    }


def test_a_legacy_formatter_learns_of_an_error() -> None:
    def legacy(token: Token, first_token: bool, last_token: bool, details: Any, text: str, id: int) -> str:
        return json.dumps(details)

    made = request(legacy)
    made.set_next_token(Token(-1, ""), True, "error")
    assert made.get_next_token() == '{"finish_reason": "error"}'


def collect(output: TextGenerationOutput) -> str:
    token = output.best_sequence.get_next_token()[0]
    return f"<{token.text}>" if token else ""


def annotated_by_text(output: RequestOutput, extra: int = 0) -> str:
    return collect(output)  # type: ignore[arg-type]


@pytest.mark.parametrize("formatter", [collect, annotated_by_text, lambda output: collect(output)])
def test_a_new_formatter_is_called_while_there_are_unread_tokens_of_a_stream(formatter: Any) -> None:
    made = request(formatter, stream=True)
    made.set_next_token("a")
    made.set_next_token("b")
    assert made.get_next_token() == "<a><b>"
    assert made.get_content_type() is None


def test_a_new_formatter_is_called_once_a_step_where_nothing_is_streamed() -> None:
    calls = []

    def whole(output: TextGenerationOutput) -> str:
        calls.append(output.finished)
        return "done" if output.finished else ""

    assert steps(request(whole), "a", "b", "c") == ["", "", "done"]
    assert calls == [False, False, True]


def test_a_formatter_that_never_goes_on_is_an_error_and_not_an_endless_loop() -> None:
    def stuck(output: TextGenerationOutput) -> str:
        return "x"

    made = request(stuck, stream=True)
    made.set_next_token("a")
    with pytest.raises(RuntimeError, match="must call get_next_token"):
        made.get_next_token()
