"""Limits the cost and the depth of a JSON text before it is decoded.

A decoder holds the interpreter's lock (GIL), so no other thread runs until it returns. With these limits, most texts of
64 MiB are decoded in 0.3 s, and the slowest in 0.5 s. Without them, 64 MiB of empty arrays take 6 s, different keys 2
s, fractions 1.6 s, numbers with 4,000 digits 2.5 s, and numbers with large exponents two minutes (msgspec 0.22 on a
2.5 GHz core).
"""

from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from handlers.contract import LONG_BODY

# Bytes. Shorter texts are decoded in at most 40 ms, so they are checked only if they have more than `MOST_DEPTH`
# brackets.
CHECKED = 16 * 1024
# The maximum depth of objects and arrays. In deeper documents, recursive code would reach the interpreter's limit, and
# the pickled parameters of a request would crash the engine process.
MOST_DEPTH = 128
# The maximum cost of a text. The unit is the part: each comma costs one part. Decoding a text of this cost takes 0.2 s,
# or 0.5 s if its items are long integers.
MOST_PARTS = 2_500_000
OF_STRUCTURE = 10  # The cost of an object, an array or a key, which takes 0.3 µs.
OF_FRACTION = 5  # The cost of a decimal point. Most fractions take 0.07 µs, the slowest 0.5 µs.
OF_EXPONENT = 500  # The cost of an exponent. 1e300 takes 14 µs.
MOST_DIGITS = 100  # The maximum number of consecutive digits, because long numbers take quadratic time.

_PIECE = 64 * 1024
_WHITE_SPACE = b" \t\r\n"
_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * (MOST_DIGITS + 1)
_BRACKETS = bytes.maketrans(b"[]", b"{}")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_TOO_DEEP = f"it is nested more than {MOST_DEPTH} levels deep"

# This lock is held while a thread checks and decodes a long text. Two texts at once would block all other work for
# twice as long.
_one_at_a_time = threading.RLock()

T = TypeVar("T")
P = ParamSpec("P")


class JsonTooCostly(msgspec.DecodeError):
    """A JSON text would take too long to decode, or is nested too deeply. The message names the limit."""


class NotUtf8(msgspec.DecodeError):
    """A text is not in UTF-8. The reason is Python's message."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"it is not in UTF-8 (RFC 8259): {reason}")
        self.reason = reason


class JsonDecoder(Generic[T]):
    """A `msgspec.json.Decoder` for texts from clients. It refuses costly texts."""

    def __init__(self, shape: type[T] | None = None) -> None:
        """Create the JSON decoder.

        Args:
            shape: The type of the document. None allows any type.
        """
        decoder: Any = msgspec.json.Decoder(Any if shape is None else shape)
        self._decode: Callable[[bytes | str], T] = decoder.decode

    def decode(self, text: bytes | str) -> T:
        """Decode a document.

        Call it in a thread if the text has `LONG_BODY` bytes or more.

        Raises:
            JsonTooCostly: The text would take too long to decode, or is nested too deeply.
            NotUtf8: The text is not in UTF-8.
            msgspec.DecodeError: The text is not JSON, or is not of the expected type.
        """
        return self.decode_with_size(text)[0]

    def decode_with_size(self, text: bytes | str) -> tuple[T, int | None]:
        """Decode a document as `decode` does. Also return its size, as `check_limits` does."""
        try:
            if isinstance(text, str):
                text = text.encode("utf-8", "surrogatepass")
            with _turn(text):
                size = check_limits(text)
                # msgspec does not check the strings of fields that the shape omits or keeps as raw JSON.
                _check_utf8(text)
                return self._decode(text), size
        except msgspec.DecodeError:
            raise
        except UnicodeDecodeError as error:
            raise NotUtf8(error.reason) from None
        except ValueError as error:  # A number is too long to read.
            raise msgspec.DecodeError(str(error)) from None
        except RecursionError:  # After the check of limits, only a document without closing brackets can be so deep.
            raise JsonTooCostly(_TOO_DEEP) from None


def _turn(text: bytes) -> AbstractContextManager[Any]:
    """Return the lock to hold while a text is read. Short texts need no lock."""
    return _one_at_a_time if len(text) >= LONG_BODY else nullcontext()


def _check_utf8(text: bytes) -> None:
    """Check piece by piece that a text is in UTF-8. Raises UnicodeDecodeError."""
    if len(text) <= _PIECE:
        str(text, "utf-8")
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _PIECE):
        decoder.decode(text[start : start + _PIECE], final=start + _PIECE >= len(text))


async def off_the_loop(body: bytes, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that reads the body, and return its result. If the body is long, call it in a thread."""
    if len(body) < LONG_BODY:
        return function(*args, **keywords)
    return await asyncio.to_thread(function, *args, **keywords)


def check_limits(text: bytes) -> int | None:
    """Check piece by piece that a text is within the limits. Other threads run between the pieces.

    Returns:
        The size of the text: the number of its commas, objects and arrays. None for short texts with few brackets,
        which are not checked.

    Raises:
        JsonTooCostly: The text costs more than `MOST_PARTS`, a number has too many digits, or the document is nested
            too deeply.
    """
    if len(text) < CHECKED and text.count(b"{") + text.count(b"[") <= MOST_DEPTH:
        return None
    keys = structures = closed = values = points = letters = 0
    end, brackets = b"", []
    with _turn(text):
        for outside in _pieces(text):
            count = outside.count
            keys += count(b":")
            structures += count(b"{") + count(b"[")
            closed += count(b"}") + count(b"]")
            values += count(b",")
            points += count(b".")
            # `true` and `false` have an e each. Outside strings, t occurs only in `true`, and f only in `false`.
            letters += count(b"e") + count(b"E") - count(b"t") - count(b"f")
            parts = values + (keys + max(structures, closed)) * OF_STRUCTURE
            if parts + points * OF_FRACTION + letters * OF_EXPONENT > MOST_PARTS:
                raise JsonTooCostly(
                    f"it has more than {MOST_PARTS} parts (an item counts 1, a key, an object or an array "
                    f"{OF_STRUCTURE}, a decimal point {OF_FRACTION}, and an exponent {OF_EXPONENT})"
                )
            if _LONG_NUMBER in (end + outside).translate(_DIGITS):
                raise JsonTooCostly(f"a number has more than {MOST_DIGITS} digits")
            end = (end + outside)[-MOST_DIGITS:]
            brackets.append(outside.translate(_BRACKETS, _OTHERS))
        _check_depth(b"".join(brackets))
    return values + structures


def _check_depth(brackets: bytes) -> None:
    """Raise JsonTooCostly if brackets are nested too deeply. The decoder reports brackets that are never closed."""
    for _ in range(MOST_DEPTH):
        outer = brackets.replace(b"{}", b"")
        if len(outer) == len(brackets):
            return
        brackets = outer
    if b"{}" in brackets:
        raise JsonTooCostly(_TOO_DEEP)


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yield the text in pieces, without its strings and its white space.

    After the first syntax error the bytes may be wrong, but a decoder stops at that error.
    """
    inside, rest = 0, b""
    for start in range(0, len(text), _PIECE):
        piece = rest + text[start : start + _PIECE]
        rest = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            if piece.endswith(b"\\"):  # the escaped character is in the next piece
                piece, rest = piece[:-1], b"\\"
        parts = piece.split(b'"')
        yield b"".join(parts[inside::2]).translate(None, _WHITE_SPACE)
        inside ^= (len(parts) - 1) & 1
