"""Deadlines: a call ends at its deadline, with its text so far.

SageMaker ends a call after 60 seconds and a stream after 8 minutes, and drops the text so far. A deadline should be
earlier than these limits. At the deadline, each unfinished sequence ends with `FinishReason.LENGTH`, and the client
gets the text so far. A call that has not yet produced a token gets `DeadlineExceeded`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engines.errors import DeadlineExceeded, InvalidParameter
from engines.settings.declaration import setting
from engines.settings.parsers import SECONDS

T = TypeVar("T")

# In a request, this header sets the call's deadline in seconds. In a reply, its value is `reached`: the answer ended at
# its deadline, or the call failed because it had no token by then. A stream's reply does not have the header.
HEADER = b"x-slipway-deadline"
REACHED = ((HEADER.decode(), "reached"),)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of one call."""

    seconds: float  # Seconds from the arrival of the request head.
    at: float  # The time of the deadline, on the monotonic clock.

    def call(self, function: Callable[[DeadlineExceeded], object]) -> asyncio.TimerHandle:
        """Call a function at the deadline, or soon if the deadline has passed.

        The function gets the error that the call ends with if it has no token.
        """
        seconds = max(self.at - time.monotonic(), 0.0)
        return asyncio.get_running_loop().call_later(seconds, function, DeadlineExceeded(self.seconds))

    async def limit(self, work: Awaitable[T]) -> T:
        """Wait for `work`, at most until the deadline. The call must not have a token yet.

        Raises:
            DeadlineExceeded: The work took too long, and was cancelled.
        """
        try:
            async with asyncio.timeout(self.at - time.monotonic()) as timeout:
                return await work
        except TimeoutError:
            if not timeout.expired():  # the work itself timed out
                raise
            raise DeadlineExceeded(self.seconds) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineConfig:
    """The deadlines of a model's calls, in seconds from the arrival of the request head. None means no deadline."""

    answer: float | None = setting(
        "option.answer_deadline",
        SECONDS,
        doc="Time limit of a whole answer; at the limit, the client gets the text so far",
    )
    stream: float | None = setting(
        "option.stream_deadline", SECONDS, doc="Time limit of a stream; at the limit, the client gets the text so far"
    )

    def of(self, arrived_at: float, time_limit: float | None, *, stream: bool | None) -> Deadline | None:
        """Return the deadline of a call, or None.

        Args:
            arrived_at: The arrival time of the request head, on the monotonic clock.
            time_limit: The time limit in seconds that the call asks for. A shorter limit of the model takes precedence.
            stream: True if the answer is streamed. None if that is not known yet: the later of the model's two
                deadlines then applies.
        """
        limit = self.stream if stream else self.answer
        if stream is None and limit is not None:
            limit = None if self.stream is None else max(limit, self.stream)
        limits = [seconds for seconds in (time_limit, limit) if seconds is not None]
        return Deadline(min(limits), arrived_at + min(limits)) if limits else None


NO_DEADLINES = DeadlineConfig()


def read_time_limit(
    headers: Mapping[bytes, bytes], attributes: Sequence[tuple[bytes, bytes]]
) -> tuple[float | None, InvalidParameter | None]:
    """Read the time limit that a call asks for. The header takes precedence over the attribute `deadline`.

    Args:
        headers: All headers, keyed by lower-case name.
        attributes: SageMaker's custom attributes, with names in lower case.

    Returns:
        The seconds if the call sets a limit, and an error if the value is not valid for `option.answer_deadline`.
    """
    name, value = "X-Slipway-Deadline", headers.get(HEADER)
    if value is None:
        name, value = "deadline", next((value for name, value in attributes if name == b"deadline"), None)
    if value is None:
        return None, None
    text = value.decode("latin-1")
    try:
        return SECONDS(text), None
    except ValueError:
        return None, InvalidParameter(name, f"must be {SECONDS.allowed}; got {text[:20]!r}")
