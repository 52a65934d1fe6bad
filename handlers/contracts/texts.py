"""Limits on what one call may have tokenized on routes that generate nothing.

Where text is generated, the model's context bounds the prompt. Here a limit of our own is needed: a tokenizer takes up
to 200 bytes of memory and 2 µs for each byte of a text.
"""

from __future__ import annotations

from handlers.contracts.protocol import Call
from handlers.errors import InvalidParameter, InvalidRequest

MOST_BYTES = 1 << 20
"""Of a text, in UTF-8: about 300,000 tokens of English."""
PLACED_BYTES = MOST_BYTES // 2
"""The same where the answer gives each token's place: that takes more memory and twice the time."""
MOST_IDS = 1 << 19
MOST_BODY = 4 * MOST_BYTES
"""Bytes of a body: the longest text, and as many ids, with all characters beyond ASCII escaped."""


def check_body(call: Call) -> None:
    """Raise InvalidRequest if a body is too long to hold an allowed text; called before it is read."""
    if len(call.body) > MOST_BODY:
        raise InvalidRequest(f"the body has {len(call.body)} bytes; this route takes at most {MOST_BODY}")


def check_text(name: str, text: str, most: int = MOST_BYTES) -> str:
    """The text, which is the parameter `name` or made of it.

    Raises:
        InvalidParameter: it is too long.
    """
    size = len(text) if len(text) > most or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise InvalidParameter(name, f"may have at most {most} bytes of text, got {size}")
    return text
