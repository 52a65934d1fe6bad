"""The faults that the trial of a constraint finds."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")


from engines.vllm.constraints.trial_process import CHECK_CPU_SECONDS, TOO_MUCH, Trial, trial, verdict
from tests.unit.engines.vllm.constraints.byte_tokens import END, byte_tokenizer, byte_tokens

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
def test_the_attributes_of_a_rule_are_taken_but_with_a_draft_only_those_that_can_be_taken_back(grammar: str) -> None:
    assert trial(TOKENS, "grammar", grammar).error == ""
    error = trial(TOKENS, "grammar", grammar, drafts=True).error
    assert bool(error) == (grammar in NO_RETURN), error


@pytest.mark.parametrize(
    "grammar", ['start: a "z"\na[stop=""]: /(?s:.*)/\n', 'start: "a" <end> "b"\n', 'start: a\na: a "x"\n']
)
def test_a_grammar_that_ends_an_answer_in_its_middle_or_has_no_text_is_refused(grammar: str) -> None:
    assert trial(TOKENS, "grammar", grammar).error


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "answer", "expected"),
    [
        (UNIQUE, "[1,2]", "valid"),
        (UNIQUE, "[1,1]", "invalid"),
        (UNIQUE, "[1,1.0]", "invalid"),
        (UNIQUE, "[1,", "incomplete"),
        (UNIQUE, "", "incomplete"),
        (UNIQUE, "[" * 100_000, "unchecked"),
        (True, "1" * 5000, "unchecked"),
        ({"type": "integer", "$schema": "http://json-schema.org/draft-04/schema#"}, "1", "valid"),
        ({"exclusiveMaximum": 1, "$schema": "http://json-schema.org/draft-07/schema#"}, "1", "invalid"),
        ({"type": "integer", "$schema": "unknown"}, "1", "valid"),
        ({"format": "date"}, '"2000-13-01"', "invalid"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "1", "invalid"),
        ({"$ref": "#"}, "1", "unchecked"),
        ({"$ref": "#/$defs/none"}, "1", "unchecked"),
        ({"pattern": "("}, '"a"', "unchecked"),
        ({"multipleOf": 0}, "1", "unchecked"),
        ({"type": 5}, "1", "unchecked"),
    ],
)
def test_a_finished_answer_is_checked_against_its_schema(schema: Any, answer: str, expected: str) -> None:
    assert verdict(json.dumps(schema), answer) == expected


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """The time of a check must not include a collection of the objects of all tests."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"pattern": "^(a+)+$"}, json.dumps("a" * 60 + "b")),
        (UNIQUE, json.dumps([{"a": number} for number in range(20_000)])),
    ],
)
def test_a_check_that_takes_too_long_is_given_up(schema: Any, answer: str) -> None:
    assert verdict(json.dumps(schema), answer) == "unchecked"
    assert verdict(json.dumps(UNIQUE), "[1]") == "valid"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_check_whose_first_signal_comes_in_a_finalizer_is_given_up() -> None:
    class Slow:
        def __del__(self) -> None:
            end = time.process_time() + 1.5 * CHECK_CPU_SECONDS
            while time.process_time() < end:
                pass

    def free(*_: Any) -> None:
        if signal.getitimer(signal.ITIMER_PROF)[0]:
            garbage.clear()

    garbage = [Slow()]
    thresholds = gc.get_threshold()
    gc.callbacks.append(free)
    try:
        gc.set_threshold(1)
        gc.enable()
        assert verdict(json.dumps({"pattern": "^(a+)+$"}), json.dumps("a" * 60 + "b")) == "unchecked"
    finally:
        gc.callbacks.remove(free)
        gc.set_threshold(*thresholds)
    assert not garbage


def endless(levels: int) -> dict[str, Any]:
    """Return a schema that refers to itself forever. The levels decide which part of the validator fails."""
    endless: Any = {"$ref": "#/$defs/L"}
    for _ in range(levels):
        endless = {"allOf": [endless]}
    return {
        "required": ["a"],
        "$defs": {"L": {"type": ["object", "null"], "not": {"$ref": "#/$defs/L"}}},
        "not": endless,
    }


@pytest.mark.parametrize("levels", range(12))
def test_a_schema_without_an_end_ends_no_process(levels: int) -> None:
    assert verdict(json.dumps(endless(levels)), '{"a":1}') == "unchecked"
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


class Panic(BaseException):
    """Stands for `pyo3_runtime.PanicException`."""


def answers_of_a_process(trial: Callable[..., Trial]) -> list[str]:
    """Return the faults that a process finds in two constraints. It ends with code 0."""
    first = {"tokenizer": byte_tokenizer().to_str(), "vocabulary_size": END + 1, "eos": END, "drafts": False}
    lines = [json.dumps(message) for message in (first, *[{"kind": "regex", "text": text} for text in "ab"])]
    program = (
        f"from engines.vllm.constraints import trial_process; from {__name__} import {trial.__name__} as trial; "
        "trial_process.trial = trial; trial_process.main()"
    )
    run = subprocess.run([sys.executable, "-c", program], input="\n".join(lines), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line)[0] for line in run.stdout.splitlines()[1:]]


def out_of_memory(*_: Any, **__: Any) -> Trial:
    raise MemoryError


def panicking(*_: Any, **__: Any) -> Trial:
    raise Panic


@pytest.mark.parametrize("trial", [out_of_memory, panicking])
def test_a_constraint_that_the_process_gives_up_is_refused_and_the_process_ends(trial: Callable[..., Trial]) -> None:
    assert answers_of_a_process(trial) == [TOO_MUCH]


def test_no_schema_is_fetched() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # The validator warns of the fetch that it tries by default.
        assert verdict(json.dumps({"$ref": "http://127.0.0.1:1/x"}), "1") == "unchecked"
