"""Estimates the time that a JSON text takes to decode, and refuses costly texts before they are decoded.

A decoder holds the interpreter's lock, so no other thread runs until it returns. Most texts of 64 MiB are decoded in
0.2 s. Texts of keys, objects or numbers with exponents take up to a minute and a half. The costs below are worst cases,
measured with msgspec 0.22 on a core of 2.5 GHz.
"""

from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from handlers.contract import LONG_BODY

CHECKED = 16 * 1024  # Bytes; shorter texts are decoded in 25 ms at most.
MOST_NANOSECONDS = 100_000_000
MOST_DIGITS = 100  # In a row; long numbers take quadratic time.
MOST_EXPONENTS = 2_000  # A number such as 1e300 takes 9 µs.
_OF_KEY, _OF_GROUP = 300, 300  # A group is an object or an array.
_OF_STRING, _OF_VALUE, _OF_BYTE, _OF_ESCAPE = 50, 20, 3, 8  # Bytes outside strings.

_PIECE = 64 * 1024
_WHITE_SPACE = b" \t\r\n"
_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * (MOST_DIGITS + 1)

# Held while a thread checks and decodes a long text: two at a time would keep all else waiting for twice as long.
_one_at_a_time = threading.Lock()

T = TypeVar("T")
P = ParamSpec("P")


class JsonTooCostly(msgspec.DecodeError):
    """A JSON text would take too long to decode. The message names the reason."""


class NotUtf8(msgspec.DecodeError):
    """A text is not in UTF-8. The reason is Python's."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"it is not in UTF-8 (RFC 8259): {reason}")
        self.reason = reason


class JsonDecoder(Generic[T]):
    """A `msgspec.json.Decoder` for texts from clients. It refuses costly texts."""

    def __init__(self, shape: type[T] | None = None) -> None:
        """Create the JSON decoder.

        Args:
            shape: The type of the document; None for any.
        """
        decoder: Any = msgspec.json.Decoder(Any if shape is None else shape)
        self._decode: Callable[[bytes | str], T] = decoder.decode

    def decode(self, text: bytes | str) -> T:
        """Decode a document.

        Call it in a thread if the text has `LONG_BODY` bytes or more.

        Raises:
            JsonTooCostly: The text would take too long to decode.
            NotUtf8: The text is not in UTF-8.
            msgspec.DecodeError: The text is no JSON, is nested too deeply, or is not of the expected type.
        """
        try:
            # msgspec does not look into strings that the shape leaves out or keeps encoded, such as those for vLLM.
            if len(text) < CHECKED:
                if not isinstance(text, str):
                    str(text, "utf-8")
                return self._decode(text)
            if isinstance(text, str):
                text = text.encode("utf-8", "surrogatepass")
            with _one_at_a_time if len(text) >= LONG_BODY else nullcontext():
                check_cost(text)
                _check_utf8(text)
                return self._decode(text)
        except msgspec.DecodeError:
            raise
        except UnicodeDecodeError as error:
            raise NotUtf8(error.reason) from None
        except ValueError as error:  # A number is too long to read.
            raise msgspec.DecodeError(str(error)) from None
        except RecursionError:
            raise msgspec.DecodeError("the document is nested too deeply") from None


def _check_utf8(text: bytes) -> None:
    """Check a text piece by piece. Raises UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _PIECE):
        decoder.decode(text[start : start + _PIECE], final=start + _PIECE >= len(text))


async def off_the_loop(body: bytes, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that reads the body, in a thread if the body is long. Returns its result."""
    if len(body) < LONG_BODY:
        return function(*args, **keywords)
    return await asyncio.to_thread(function, *args, **keywords)


def check_cost(text: bytes) -> None:
    """Check a text piece by piece.

    Other threads run between the pieces.

    Raises:
        JsonTooCostly: Decoding would take longer than `MOST_NANOSECONDS`, or a number has too many digits, or too many
            numbers have exponents.
    """
    if len(text) < CHECKED:
        return
    keys = groups = quotes = values = letters = size = escapes = 0
    end = b""  # The last bytes outside strings.
    for further_quotes, further_escapes, outside in _pieces(text):
        count = outside.count
        keys += count(b":")
        groups += count(b"{") + count(b"[")
        values += count(b",")
        # `true` and `false` have an e each, and their other letters are in nothing else outside strings.
        letters += count(b"e") + count(b"E") - count(b"t") - count(b"f")
        quotes += further_quotes
        escapes += further_escapes
        size += len(outside)
        if _LONG_NUMBER in (end + outside).translate(_DIGITS):
            raise JsonTooCostly(f"a number has more than {MOST_DIGITS} digits")
        end = (end + outside)[-MOST_DIGITS:]
        exponents = max(letters, 0)
        if exponents > MOST_EXPONENTS:
            raise JsonTooCostly(f"more than {MOST_EXPONENTS} numbers have exponents")
        cost = keys * _OF_KEY + groups * _OF_GROUP + quotes // 2 * _OF_STRING + values * _OF_VALUE
        if cost + size * _OF_BYTE + escapes * _OF_ESCAPE > MOST_NANOSECONDS:
            raise JsonTooCostly(
                f"it has too many parts: more than {keys} keys, {groups} objects and arrays, {values} commas and "
                f"{escapes} escaped characters"
            )


def groups_in(text: bytes) -> int:
    """Return the number of objects and arrays."""
    return sum(outside.count(b"{") + outside.count(b"[") for _, _, outside in _pieces(text))


def _pieces(text: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield for each piece the numbers of quotes and of escapes, and the bytes outside strings without white space.

    Behind the first syntax error the numbers may be wrong. A decoder stops at the error.
    """
    inside, rest = 0, b""
    for start in range(0, len(text), _PIECE):
        piece = rest + text[start : start + _PIECE]
        rest, escapes = b"", 0
        if b"\\" in piece:
            escapes = piece.count(b"\\")  # an escaped backslash counts twice
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            if piece.endswith(b"\\"):  # the escaped character is in the next piece
                piece, rest = piece[:-1], b"\\"
        parts = piece.split(b'"')
        yield len(parts) - 1, escapes, b"".join(parts[inside::2]).translate(None, _WHITE_SPACE)
        inside ^= (len(parts) - 1) & 1
