from __future__ import annotations

import pytest

from djl_python.request_io import (
    NEXT_TOKEN_ARITY,
    RequestInput,
    Sequence,
    TextGenerationOutput,
    TextInput,
    Token,
)


def sequence(*texts: str) -> Sequence:
    made = Sequence()
    for index, text in enumerate(texts):
        made.set_next_token(Token(index, text), is_last_token=index == len(texts) - 1)
    return made


def test_a_token_shows_only_what_is_set() -> None:
    assert Token(7, " a").as_dict() == {"id": 7, "text": " a", "log_prob": None}
    failed = Token(-1, "", -1, True, "no memory")
    assert failed.as_dict() == {"id": -1, "text": "", "log_prob": -1, "special_token": True, "error_msg": "no memory"}
    assert failed.as_tgi_dict() == {"id": -1, "text": "", "logprob": -1, "special": True}


def test_tokens_are_read_once_with_their_place() -> None:
    made = sequence("a", "b")
    assert made.has_next_token()
    assert [made.get_next_token()[0].text, made.get_next_token()[0].text] == ["a", "b"]
    assert not made.has_next_token()
    made = sequence("a", "b")
    assert made.get_next_token()[1:] == (0, True, False)
    assert made.get_next_token()[1:] == (1, False, True)
    assert made.get_next_token() == (None, 0, False, False)


def test_the_older_form_of_the_next_token_has_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEXT_TOKEN_ARITY, "3")
    made = sequence("a")
    token, is_first, is_last = made.get_next_token()
    assert (token.text, is_first, is_last) == ("a", True, True)
    assert made.get_next_token() == (None, False, False)


def test_another_number_of_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEXT_TOKEN_ARITY, "5")
    with pytest.raises(ValueError, match="must be 3 or 4, not '5'"):
        sequence("a").get_next_token()


def test_the_last_token_is_known_once_it_is_set() -> None:
    made = Sequence()
    assert made.get_last_token() is None
    made.set_next_token(Token(1, "a"), is_last_token=True)
    last = made.get_last_token()
    assert last is not None
    assert last.text == "a"


def test_alternatives_are_read_once() -> None:
    made = Sequence()
    made.set_next_top_tokens([Token(1, "a")])
    assert made.has_next_top_tokens()
    assert [token.text for token in made.get_next_top_tokens() or ()] == ["a"]
    assert made.get_next_top_tokens() is None
    assert not made.has_next_top_tokens()


def test_sequences_begin_with_their_first_token_and_the_first_is_there_already() -> None:
    output = TextGenerationOutput(request_id=1, input=TextInput())
    assert list(output.sequences) == [0]
    output.set_next_token(Token(1, "a"), sequence_index=2, is_last_token=True, finish_reason="length")
    output.set_next_top_tokens([Token(9, "z", -1.0)], sequence_index=2)
    output.set_best_sequence_index(2)
    assert output.best_sequence.finish_reason == "length"
    output.set_finish_reason("eos_token", 2)
    assert output.sequences[2].finish_reason == "eos_token"
    assert output.get_tokens_as_dict(2) == [{"id": 1, "text": "a", "log_prob": None}]
    assert output.get_top_tokens_as_dict(2) == [[{"id": 9, "text": "z", "log_prob": -1.0}]]


def test_tokens_have_tgi_names_where_the_request_is_tgi_compatible() -> None:
    output = TextGenerationOutput(request_id=1, input=TextInput(tgi_compat=True))
    output.set_next_token(Token(1, "a", -0.5))
    output.prompt_tokens_details = [Token(2, "p")]
    assert output.get_tokens_as_dict() == [{"id": 1, "text": "a", "logprob": -0.5}]
    assert output.get_prompt_tokens_as_dict() == [{"id": 2, "text": "p", "logprob": None}]


def test_requests_share_no_parameters() -> None:
    first, second = TextInput(input_text="a"), RequestInput()
    first.parameters["n"] = 1
    assert second.parameters == {}
    assert TextInput(input_text="a", input_ids=[1, 2]).input_ids == [1, 2]
