"""What a stream sends while it has nothing to say, so that nobody between server and client takes it for dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SECONDS = 15.0
"""TGI's interval (contracts/tgi.md section 4)."""


class KeepAlive:
    """Writes a comment whenever a stream has said nothing from one tick to the next."""

    __slots__ = ("_comment", "_timer", "_write", "spoken")

    def __init__(self, comment: bytes, write: Callable[[bytes], None]) -> None:
        self._comment, self._write = comment, write
        self.spoken = True
        """Set by whoever writes to the stream: cheaper for each token than a look at the clock."""
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._tick)

    def _tick(self) -> None:
        if not self.spoken:
            self._write(self._comment)
        self.spoken = False
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._tick)

    def stop(self) -> None:
        """Nothing more is written."""
        self._timer.cancel()
