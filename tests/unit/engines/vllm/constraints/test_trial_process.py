"""What the trial of a constraint finds."""

from __future__ import annotations

import pytest

from engines.vllm.constraints.trial_process import trial
from tests.unit.engines.vllm.constraints.byte_tokens import byte_tokens

TOKENS = byte_tokens()
NO_RETURN = [
    "start: a\na[max_tokens=8]: /(?s:.*)/\n",
    'start: a\na[max_tokens=1]: "abc"\n',
    'start: a "!" a\na[max_tokens=2]: /[a-z]*/\n',
    'start: a\na[max_tokens=3]: %json {"type": "integer"}\n',
    'start: a b\na[max_tokens=3, stop="x"]: /[a-z]*/\nb: "z"',
    'start: a\na[stop="x", stop_capture="y"]: /[a-z]*/\n',
    'start: "q" a\na[stop=""]: /(?s:.*)/\n',
]
"""Grammars that cannot be reset."""
OTHERS = [
    'start: a\na[suffix="x"]: /(?s:.*)/\n',
    "start: a\na[lazy]: /[a-z]*x/\n",
    "start: a\na[temperature=0.5]: /[a-z]*/\n",
    'start: a\na[capture="x"]: /[a-z]*/\n',
    'start: "a" <end>\n',
]


@pytest.mark.parametrize("grammar", [*NO_RETURN, *OTHERS])
def test_the_attributes_of_a_rule_are_taken(grammar: str) -> None:
    assert trial(TOKENS, "grammar", grammar).error == ""


@pytest.mark.parametrize("grammar", [*NO_RETURN, *OTHERS])
def test_with_a_draft_attributes_that_cannot_be_taken_back_are_refused_by_their_names(grammar: str) -> None:
    error = trial(TOKENS, "grammar", grammar, drafts=True).error
    assert ("`max_tokens` and `stop`" in error) == (grammar in NO_RETURN), error


@pytest.mark.parametrize("grammar", ['start: a "z"\na[stop=""]: /(?s:.*)/\n', 'start: "a" <end> "b"\n'])
def test_a_grammar_that_ends_an_answer_in_its_middle_is_refused(grammar: str) -> None:
    assert "end token" in trial(TOKENS, "grammar", grammar).error


def test_a_grammar_without_a_text_is_refused() -> None:
    assert "no text satisfies it" in trial(TOKENS, "grammar", 'start: a\na: a "x"\n').error
