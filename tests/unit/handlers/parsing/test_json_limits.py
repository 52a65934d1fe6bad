"""Telling the cost of a JSON text before it is decoded."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers.contract import LONG_BODY
from handlers.parsing.json_fields import JsonError, decode_json
from handlers.parsing.json_limits import (
    CHECKED,
    MOST_DIGITS,
    MOST_EXPONENTS,
    MOST_NANOSECONDS,
    JsonDecoder,
    JsonTooCostly,
    NotUtf8,
    check_cost,
    groups_in,
    off_the_loop,
)

PADDING = b" " * CHECKED
"""Makes a text long enough to be looked at."""
# Quotes, backslashes and all that counts outside strings, and texts longer than the pieces that are looked at.
TEXTS = st.text(alphabet='"\\{}[],:eE1. \n\tü😀tf') | st.integers(1, 3).map(lambda times: '\\"{[,:' * 11_000 * times)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def counted(document: Any) -> int:
    """The objects and arrays of a document."""
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return isinstance(document, dict | list) + sum(map(counted, inner))


@pytest.mark.slow
@given(document=DOCUMENTS, ascii_only=st.booleans(), indent=st.none() | st.just(3))
@settings(max_examples=200, deadline=None)
def test_what_is_in_strings_does_not_count(document: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    assert groups_in(text) == counted(document)
    check_cost(text + PADDING)


def parts(piece: bytes, times: int) -> bytes:
    return b"[" + b",".join([piece] * times) + b"]"


@pytest.mark.parametrize(
    ("piece", "nanoseconds"),
    [(b"{}", 326 + 3), (b"[]", 326 + 3), (b"1", 20 + 6), (b'""', 50 + 20 + 3), (b'{"a":1}', 300 + 300 + 50 + 20 + 15)],
)
def test_as_many_parts_are_taken_as_the_bound_allows(piece: bytes, nanoseconds: int) -> None:
    most = MOST_NANOSECONDS // nanoseconds
    check_cost(parts(piece, most * 9 // 10))
    with pytest.raises(JsonTooCostly, match="it has too many parts: more than"):
        check_cost(parts(piece, most * 11 // 10))


@given(times=st.integers(0, 2 * MOST_EXPONENTS), number=st.sampled_from([b"1e300", b"1E+2", b"-1.5e-7"]))
@settings(max_examples=30, deadline=None)
def test_exponents_are_counted_exactly(times: int, number: bytes) -> None:
    text = b'{"true":"1e5","a":[true,false,null],"b":' + parts(number, times) + b"}" + PADDING
    if times <= MOST_EXPONENTS:
        check_cost(text)
        return
    with pytest.raises(JsonTooCostly, match=f"more than {MOST_EXPONENTS} numbers have exponents"):
        check_cost(text)


@given(before=st.integers(0, 200_000), digits=st.integers(MOST_DIGITS - 2, MOST_DIGITS + 2))
@settings(max_examples=60, deadline=None)
def test_a_long_number_is_found_at_any_place(before: int, digits: int) -> None:
    text = b"[" + b" " * before + b"1," + b"7" * digits + b"]" + PADDING
    if digits <= MOST_DIGITS:
        check_cost(text)
        return
    with pytest.raises(JsonTooCostly, match=f"a number has more than {MOST_DIGITS} digits"):
        check_cost(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(parts(b"123456", 1_000_000), id="a million token ids"),
        pytest.param(json.dumps({"inputs": '{"a": [1, 2]}, \\' * 500_000}).encode(), id="JSON in a text"),
        pytest.param(b'{"image":"' + b"A" * (48 << 20) + b'"}', id="an image in base64"),
        pytest.param(json.dumps({"logit_bias": {str(i): -100 for i in range(200_000)}}).encode(), id="biases"),
        pytest.param(parts(b'{"role":"user","content":"hi"}', 20_000), id="messages"),
    ],
)
def test_what_real_clients_send_is_taken(text: bytes) -> None:
    check_cost(text)


def test_texts_of_strings_and_bytes_are_refused_alike() -> None:
    text = parts(b"{}", 1_000_000)
    for given_text in (text, text.decode()):
        with pytest.raises(JsonError, match="too many parts"):
            decode_json(given_text)


def test_a_refused_text_is_not_decoded() -> None:
    decoder = JsonDecoder[Any]()
    with pytest.raises(JsonTooCostly):
        decoder.decode(parts(b"{}", 1_000_000) + b"this is no JSON")
    with pytest.raises(msgspec.DecodeError, match="trailing characters"):
        decoder.decode(b"{} this is no JSON")


@pytest.mark.parametrize("text", [b'"\xff"', b"[" * 5000, b'{"a": tru'])
def test_each_fault_is_one_kind_of_error(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        JsonDecoder[Any]().decode(text)


class Shape(msgspec.Struct):
    """Leaves all fields out but one, which stays encoded."""

    raw: msgspec.Raw = msgspec.Raw()


@pytest.mark.parametrize("wrong", [b"\xed\xa0\xbd", b"\xed\xa0\xbd\xed\xb8\x80", b"\xff", b"\xc0\x80", b"\xe2\x82"])
@pytest.mark.parametrize("text", [b'{"raw": "%b"}', b'{"other": ["%b"]}', b'{"%b": 1}'])
@pytest.mark.parametrize("padding", [b"", PADDING, b" " * (64 * 1024 - 12)])
def test_text_that_is_not_in_utf_8_is_refused_wherever_it_is(text: bytes, wrong: bytes, padding: bytes) -> None:
    for shape in (Shape, dict[str, msgspec.Raw], None):
        with pytest.raises(NotUtf8, match="RFC 8259"):
            JsonDecoder[Any](shape).decode(padding + text % wrong)
        JsonDecoder[Any](shape).decode(padding + text % "\ud7ff\ue000😀".encode())  # across the pieces, too


@pytest.mark.asyncio
async def test_long_bodies_are_read_in_a_thread() -> None:
    import threading

    here = threading.get_ident()
    assert await off_the_loop(b"x", threading.get_ident) == here
    assert await off_the_loop(b"x" * LONG_BODY, threading.get_ident) != here


def test_escaped_characters_count_as_they_hold_the_interpreter() -> None:
    check_cost(b'["' + b"\\n" * 12_000_000 + b'"]')
    with pytest.raises(JsonTooCostly, match="escaped characters"):
        check_cost(b'["' + b"\\n" * 13_000_000 + b'"]')
