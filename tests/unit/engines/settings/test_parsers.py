from __future__ import annotations

from typing import Any

import pytest

from engines.settings.parsers import (
    ADAPTERS,
    ASSIGNMENTS,
    BOOLEAN,
    DTYPE,
    NAMES,
    NETWORKS,
    SECONDS,
    STRINGS,
    TEXT,
    Parser,
    Scalar,
    choice,
    integer,
    integer_or,
)


@pytest.mark.parametrize(
    ("parser", "values"),
    [
        (BOOLEAN, {"TRUE": True, "yes": True, "On": True, "1": True}),
        (BOOLEAN, {"False ": False, "no": False, "OFF": False, "0": False}),
        (integer(1, 10), {" 10 ": 10}),
        (integer(0), {"+007": 7}),
        (integer_or("max", 1), {"MAX": "max", "4": 4}),
        (SECONDS, {"1.5": 1.5, "120\t": 120.0, "1e3": 1000.0}),
        (DTYPE, {"FP16": "float16", "bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16"}),
        (DTYPE, {"half": "float16", "auto": "auto"}),
        (choice({"json": 1, "sse": 2}), {"Json": 1}),
        (TEXT, {" a b ": "a b"}),
        (NETWORKS, {"10.0.0.0/8, fd00::/8": ("10.0.0.0/8", "fd00::/8"), '["192.168.1.7"]': ("192.168.1.7",)}),
        (STRINGS, {'["a", "b"]': ("a", "b"), "['</s>', 'x,y',]": ("</s>", "x,y"), "['it', \"it's\"]": ("it", "it's")}),
    ],
)
def test_a_parser_takes_what_it_allows(parser: Parser[Any], values: dict[str, Any]) -> None:
    found = {text: parser(text) for text in values}
    assert found == values
    assert [type(value) for value in found.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("parser", "texts"),
    [
        (BOOLEAN, ["", "2", "maybe"]),
        (integer(1, 10), ["0", "11"]),
        (integer(1), ["1.0", "1_000", "\u0661", "9" * 5000, ""]),
        (integer_or("max", 1), ["min", "0"]),
        (SECONDS, ["0", "-1", "nan", "inf", "1e999", "2 s"]),
        (DTYPE, ["int8", "fp8"]),
        (TEXT, [" "]),
        (NETWORKS, ["", "10.0.0.1/8", "media.example", "[10]"]),
    ],
)
def test_a_parser_refuses_what_it_does_not_allow(parser: Parser[Any], texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ValueError):
            parser(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1", {"A": "1"}),
        ("A=1 , B = 2 ", {"A": "1", "B": "2"}),
        ("FOO-BAR=1,my.var=2", {"FOO-BAR": "1", "my.var": "2"}),
        ("A=x,y,z=1,2", {"A": "x,y", "z": "1,2"}),
        ("A=http://h/?q=1,2&r=3", {"A": "http://h/?q=1,2&r=3"}),
        ("A=,B=1,", {"A": "", "B": "1"}),
    ],
)
def test_assignments_are_names_and_values_without_blanks(text: str, expected: dict[str, str]) -> None:
    assert ASSIGNMENTS(text) == expected


@pytest.mark.parametrize("text", ["", ",", "A", "=1", "1=2"])
def test_text_that_begins_with_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^" + text):
        ASSIGNMENTS(text)


@pytest.mark.parametrize(
    ("parser", "text", "shown"),
    [
        (BOOLEAN, "yes", True),
        (SECONDS, " 2.50 ", 2.5),
        (NAMES, " a, b ", "a, b"),
        (STRINGS, "['a',]", '["a"]'),
        (ADAPTERS, "x=org/x", '[{"name": "x", "path": "org/x"}]'),
    ],
)
def test_a_report_shows_numbers_and_words_as_values_and_lists_as_text(
    parser: Parser[Any], text: str, shown: Scalar
) -> None:
    assert parser.shown(text) == shown
    assert type(parser.shown(text)) is type(shown)
