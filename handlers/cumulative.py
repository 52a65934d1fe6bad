"""Sends an answer each part of which repeats all before it.

With a part for each token, bytes and time would grow with the square of the answer's length, and with the number of its
sequences once more. So a part is made when the event loop has run all of an engine's step, long ones come at a bounded
rate, and a client that lags gets the latest alone (`ReplyWriter.write_latest`).
"""

from __future__ import annotations

import asyncio

from handlers.contracts.protocol import CumulativeAnswer
from handlers.reply import ReplyWriter

_LONG = 64 * 1024
"""Bytes; parts up to this length come as often as there is something new."""
_BYTES_PER_SECOND = 32 * 1024 * 1024
"""What one answer makes of longer ones."""


class Parts:
    """The parts of one answer, as they come to be due."""

    __slots__ = ("_answer", "_at_once", "_length", "_timer", "_unsent", "_writer")

    def __init__(self, answer: CumulativeAnswer, writer: ReplyWriter, sequences: int) -> None:
        """`sequences`: how many the answer has; a single one has nothing to wait for in a step."""
        self._answer, self._writer, self._at_once = answer, writer, sequences == 1
        self._length = 0
        self._timer: asyncio.Handle | None = None
        self._unsent = False

    def due(self) -> None:
        """There is something new to tell."""
        self._unsent = True
        if self._timer is not None:
            return
        if self._length > _LONG:
            self._timer = asyncio.get_running_loop().call_later(self._length / _BYTES_PER_SECOND, self._send)
        elif self._at_once:
            self._writer.write_latest(self._make)
        else:
            self._timer = asyncio.get_running_loop().call_soon(self._send)

    def last(self, *, changed: bool) -> bytes:
        """What is left to tell at the end, of which `due` has not heard if it was `changed` just now."""
        return self._make() if changed or self._unsent else b""

    def stop(self) -> None:
        """Nothing more is sent."""
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        self._timer = None
        self._writer.write_latest(self._make)

    def _make(self) -> bytes:
        self._unsent = False
        data = self._answer.latest()
        self._length = len(data)
        return data
