from __future__ import annotations

import re
from pathlib import Path

import javaproperties
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.settings.properties import parse_properties, read_properties
from container.settings.values import Value


class Parsed:
    """The values of a file, and the problems that were found in it."""

    def __init__(self, data: bytes) -> None:
        self.problems: list[str] = []
        self.values: dict[str, Value] = parse_properties(data, self.problems)
        self.texts = {key: value.text for key, value in self.values.items()}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a=1", {"a": "1"}),
        (b"a:1\r\nb 2\rc\t=\t3\n", {"a": "1", "b": "2", "c": "3"}),
        (b"# comment \\\n! another\n\n  a = 1", {"a": "1"}),
        (b"a=one \\\n   two", {"a": "one two"}),
        (b"a=trailing  \n", {"a": "trailing  "}),
        (b"a=\\u00e9\\t\\\\", {"a": "é\t\\"}),
        (b"a=\xe9", {"a": "é"}),
        (b"a=\\ud83d\\ude00", {"a": "\U0001f600"}),
        (b"a\\=b=c=d", {"a=b": "c=d"}),
        (b"a", {"a": ""}),
        (b"a=1\na=2", {"a": "2"}),
        (b"", {}),
    ],
)
def test_a_file_is_read_as_java_reads_it(data: bytes, expected: dict[str, str]) -> None:
    file = Parsed(data)
    assert file.texts == expected
    assert file.problems == []


def test_a_value_knows_its_key_in_the_file() -> None:
    assert Parsed(b"option.dtype=fp16").values["option.dtype"].source == "serving.properties: option.dtype"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"a=1\nb=\\u12\n", r"\\\\u12 is not an escape"),
        (b"a=\\\n1\n\nb=C:\\users", r"\\\\users is not an escape"),
        (b"a=\\ud800", "'a' has a NUL or half a surrogate pair"),
        (b"#\n#\na=\\u0000", "'a' has a NUL"),
        (b"a\\nb=1", r"'a\\nb' has a NUL .* or cannot be shown"),
    ],
)
def test_a_broken_entry_is_a_problem(data: bytes, problem: str) -> None:
    (found,) = Parsed(data).problems
    assert re.match(rf"serving.properties(, line \d+)?: {problem}", found), found


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    assert Parsed(b"\xef\xbb\xbfoption.model_id=org/x\r\nb=2").texts == {"option.model_id": "org/x", "b": "2"}


def test_a_missing_file_is_empty_and_an_unreadable_one_a_problem(tmp_path: Path) -> None:
    problems: list[str] = []
    assert read_properties(tmp_path, problems) == {}
    assert problems == []
    (tmp_path / "serving.properties").mkdir()
    assert read_properties(tmp_path, problems) == {}
    (problem,) = problems
    assert problem.startswith("serving.properties cannot be read: ")


@given(st.binary())
def test_any_bytes_give_values_or_problems(data: bytes) -> None:
    file = Parsed(data)
    try:
        expected = javaproperties.loads(data)
    except javaproperties.InvalidUEscapeError:
        assert file.problems
        return
    assert file.problems or file.texts == expected


@given(st.dictionaries(st.text("abc.=: \\é#", min_size=1), st.text("xyz =:\\\n\té中"), max_size=5))
def test_what_java_would_write_is_read_back(values: dict[str, str]) -> None:
    assert Parsed(javaproperties.dumps(values).encode("ascii")).texts == values
