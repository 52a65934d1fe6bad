"""The cost of a JSON text is known before it is decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers.contract import LONG_BODY
from handlers.parsing.json_fields import JsonError, decode_json
from handlers.parsing.json_limits import (
    CHECKED,
    MOST_DEPTH,
    MOST_DIGITS,
    MOST_PARTS,
    OF_EXPONENT,
    OF_FRACTION,
    OF_STRUCTURE,
    JsonDecoder,
    JsonTooCostly,
    NotUtf8,
    check_limits,
    off_the_loop,
)

PADDING = b" " * CHECKED
"""Spaces that make a text long enough to be checked."""
# Texts with quotes, backslashes, and the characters that have a meaning in JSON outside of strings. Some are longer
# than the checked pieces.
TEXTS = st.text(alphabet='"\\{}[],:eE1. \n\tü😀tf') | st.integers(1, 3).map(lambda times: '\\"{[,:' * 11_000 * times)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def counted(document: Any) -> int:
    """Return the size of a document. Values are counted by commas, so the first value of an object or array is free."""
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return sum(map(counted, inner)) + max(len(inner) - 1, 0) + isinstance(document, dict | list)


@pytest.mark.slow
@given(document=DOCUMENTS, ascii_only=st.booleans(), indent=st.none() | st.just(3))
def test_what_is_in_strings_does_not_count(document: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    assert check_limits(text + PADDING) == counted(document)


def parts(piece: bytes, times: int) -> bytes:
    return b"[" + b",".join([piece] * times) + b"]"


EXPONENT = 1 + OF_EXPONENT


@pytest.mark.parametrize(
    ("piece", "each"),
    [
        (b"{}", 1 + OF_STRUCTURE),
        (b"[]", 1 + OF_STRUCTURE),
        (b"1", 1),
        (b'""', 1),
        (b"true", 1),
        (b"false", 1),
        (b'{"a":1}', 1 + 2 * OF_STRUCTURE),
        (b"1e300", EXPONENT),
        (b"1E+2", EXPONENT),
        (b"-1.5e-7", EXPONENT + OF_FRACTION),
        (b"9007199254740993.0000001", 1 + OF_FRACTION),
    ],
)
def test_as_many_parts_are_taken_as_the_bound_allows(piece: bytes, each: int) -> None:
    most = (MOST_PARTS - OF_STRUCTURE + 1) // each  # The array around the pieces counts as a structure.
    structures = 1 + most * (piece.count(b"[") + piece.count(b"{"))
    assert check_limits(parts(piece, most)) == most - 1 + structures
    with pytest.raises(JsonTooCostly):
        check_limits(parts(piece, most + 1))


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"]}":', b"}]")])
@pytest.mark.parametrize("padding", [b"", PADDING, b" " * (64 * 1024)])
def test_documents_have_a_depth(opening: bytes, closing: bytes, padding: bytes) -> None:
    levels = MOST_DEPTH // len(closing)
    value = (b"[1]," + padding) * 3 + b"[1]"  # Arrays next to each other add no levels.
    document = b"[" + opening * (levels - 2) + b"1" + closing * (levels - 2) + b"," + value + b"]"
    JsonDecoder[Any]().decode(document)
    for further in (levels + 1, 400, 100_000 // len(closing)):
        with pytest.raises(JsonTooCostly, match=str(MOST_DEPTH)):
            JsonDecoder[Any]().decode(padding + opening * further + b"1" + closing * further)


@pytest.mark.parametrize(
    "text",
    [
        *(b"[" * 5000, b"[" * 200, b'{"a":' * 5000, b"[" * 200 + b"}" * 200, b"]" * 5000),
        *(b'"\xff"', b'{"a": tru'),
    ],
)
def test_each_fault_is_one_kind_of_error(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        JsonDecoder[Any]().decode(text)


@pytest.mark.parametrize("opening", [b"", b"[" * MOST_DEPTH])
def test_closing_brackets_are_bounded_too(opening: bytes) -> None:
    most = MOST_PARTS // OF_STRUCTURE
    assert check_limits(opening + b"]" * most) == len(opening)
    with pytest.raises(JsonTooCostly, match=str(MOST_PARTS)):
        check_limits(opening + b"]}" * most)


def test_a_short_text_is_not_counted() -> None:
    assert check_limits(parts(b"[]", MOST_DEPTH - 1)) is None
    assert JsonDecoder[Any]().decode_with_size(b"[1]") == ([1], None)
    assert JsonDecoder[Any]().decode_with_size(b"[1,2]" + PADDING) == ([1, 2], 2)


@given(before=st.integers(0, 200_000), digits=st.integers(MOST_DIGITS - 2, MOST_DIGITS + 2))
@settings(max_examples=60)
def test_a_long_number_is_found_at_any_place(before: int, digits: int) -> None:
    text = b"[" + b" " * before + b"1," + b"7" * digits + b"]" + PADDING
    if digits <= MOST_DIGITS:
        check_limits(text)
        return
    with pytest.raises(JsonTooCostly, match=str(MOST_DIGITS)):
        check_limits(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(lambda: parts(b"123456", 1_000_000), id="a million token ids"),
        pytest.param(lambda: json.dumps({"inputs": '{"a": [1, 2]}, \\' * 500_000}).encode(), id="JSON in a text"),
        pytest.param(lambda: b'{"image":"' + b"A" * (48 << 20) + b'"}', id="an image in base64"),
        pytest.param(lambda: json.dumps({"logit_bias": {str(i): -100 for i in range(200_000)}}).encode(), id="biases"),
        pytest.param(lambda: parts(b'{"role":"user","content":"hi"}', 20_000), id="messages"),
        pytest.param(lambda: parts(b"-0.123456", 200_000), id="vectors"),
    ],
)
def test_what_real_clients_send_is_taken(text: Callable[[], bytes]) -> None:
    check_limits(text())


def test_texts_of_strings_and_bytes_are_refused_alike() -> None:
    text = parts(b"{}", 1_000_000)
    for given_text in (text, text.decode()):
        with pytest.raises(JsonError, match=str(MOST_PARTS)):
            decode_json(given_text)


def test_a_refused_text_is_not_decoded() -> None:
    decoder = JsonDecoder[Any]()
    with pytest.raises(JsonTooCostly):
        decoder.decode(parts(b"{}", 1_000_000) + b"this is no JSON")
    with pytest.raises(msgspec.DecodeError):
        decoder.decode(b"{} this is no JSON")


class Shape(msgspec.Struct):
    """Drops all fields except one, which stays encoded."""

    raw: msgspec.Raw = msgspec.Raw()


@pytest.mark.parametrize("wrong", [b"\xed\xa0\xbd", b"\xed\xa0\xbd\xed\xb8\x80", b"\xff", b"\xc0\x80", b"\xe2\x82"])
@pytest.mark.parametrize("text", [b'{"raw": "%b"}', b'{"other": ["%b"]}', b'{"%b": 1}'])
@pytest.mark.parametrize("padding", [b"", PADDING, b" " * (64 * 1024 - 12)])
def test_text_that_is_not_in_utf_8_is_refused_wherever_it_is(text: bytes, wrong: bytes, padding: bytes) -> None:
    for shape in (Shape, dict[str, msgspec.Raw], None):
        with pytest.raises(NotUtf8):
            JsonDecoder[Any](shape).decode(padding + text % wrong)
        JsonDecoder[Any](shape).decode(padding + text % "\ud7ff\ue000😀".encode())  # across the pieces, too


async def test_long_bodies_are_read_in_a_thread() -> None:
    import threading

    here = threading.get_ident()
    assert await off_the_loop(b"x", threading.get_ident) == here
    assert await off_the_loop(b"x" * LONG_BODY, threading.get_ident) != here
