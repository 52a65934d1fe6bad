"""What contracts and handlers are.

A contract is pure: no I/O, no engine, no HTTP server. `Contract.parse` makes an `Exchange` of a call. The exchange's
`Answer` turns what the engine pushes into the bytes of the reply. A handler answers calls by pushing such bytes into a
`ReplyWriter`, without waiting for the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from djl_python.input_parser import SAGEMAKER_ADAPTER_IDENTIFIER_HEADER
from engines.errors import RequestError
from engines.request import GenerationRequest, TokenDelta

WITHOUT_BODY = frozenset({204, 304})  # RFC 9110, 8.6: statuses that have neither body nor length.
_TRACE_HEADERS = ("Traceparent", "Tracestate")
LONG_BODY = 256 * 1024  # Bytes above which a body is read in a thread, so that nothing else waits for it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An HTTP request with its whole body."""

    body: bytes
    content_type: str = ""  # As sent, parameters included; empty if absent.
    request_id: str
    # All request headers, names in canonical case (`X-Amzn-SageMaker-Session-Id`); later duplicates count.
    headers: tuple[tuple[str, str], ...] = ()
    query: tuple[tuple[str, str], ...] = ()  # Query parameters, decoded, in order.
    method: str = "POST"
    path: str = ""  # As it came in, decoded, without the query.
    # The parts of the path that `{name}` stands for in the route.
    path_parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def trace_context(self) -> dict[str, str]:
        """The headers that name the client's trace (W3C Trace Context); empty without them."""
        return {name.lower(): value for name, value in self.headers if name in _TRACE_HEADERS}


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP reply."""

    status: int
    content_type: str  # Empty: the reply has no such header.
    body: bytes
    # Further response headers, valid ones in Latin-1; they go before what the server sends with every reply.
    headers: tuple[tuple[str, str], ...] = ()


class ContractError(Exception):
    """A call that is answered without inference, with the contract's own error body."""

    def __init__(self, reply: Reply, reason: str) -> None:
        super().__init__(reason)
        self.reply = reply
        self.reason = reason  # For the log; says what was wrong, without the prompt.


class Answer(Protocol):
    """Turns the deltas of one call into the bytes of its reply."""

    content_type: str

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Further headers of the reply; read when it begins."""
        return ()

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """The bytes that this delta adds to the body; empty if there is nothing to send yet. Raises RequestError: the
        call ends here, with this error."""

    def fail(self, error: RequestError) -> Reply:
        """The reply when nothing has been sent yet."""

    def fail_midway(self, error: RequestError) -> bytes:
        """The last bytes of a body that has begun under status 200; for one that is sent whole there are none."""
        return b""


class CumulativeAnswer(Answer, Protocol):
    """An answer whose every part repeats all before it: a client that lags needs only the latest."""

    def add(self, prompt: int, delta: TokenDelta) -> bool:
        """Take a delta, without making bytes. Returns whether there is anything new to tell."""

    def latest(self) -> bytes:
        """The part with all that was added."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call as its contract understands it: requests for the engine, and the answer that they make."""

    requests: tuple[GenerationRequest, ...]  # One for each prompt; `Answer.feed` names them by their place here.
    answer: Answer
    notes: tuple[str, ...] = ()  # For the log: parameters that were ignored.
    # What the stream sends while it has nothing to say. A stream with a comment begins before its first token.
    comment: bytes = b""
    cumulative: CumulativeAnswer | None = None  # `answer`, where it is cumulative; there is no `comment` then.

    def traced_as(self, call: Call) -> Exchange:
        """Return the same, as part of the call's trace."""
        if not (context := call.trace_context):
            return self
        requests = [msgspec.structs.replace(request, trace_context=context) for request in self.requests]
        return replace(self, requests=tuple(requests))


class Contract(Protocol):
    """One wire format."""

    def parse(self, call: Call) -> Exchange:
        """Understand a call. Raises ContractError: it is answered without inference; RequestError: likewise, with the
        reply of the family's `refuse`."""


class ReplyWriter(Protocol):
    """Where one reply goes. No method blocks; a slow client makes the writer merge what it is given. A client that has
    the writer hold too much loses its connection, and the call is cancelled."""

    def reply(self, reply: Reply) -> None:
        """Send a whole reply."""

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Begin a reply whose length is not known; an empty content type is left out."""

    def write(self, data: bytes) -> None:
        """Add a part to the body."""

    def write_latest(self, part: Callable[[], bytes]) -> None:
        """Add what `part` gives, at once or when the client has taken what came before.

        For replies each part of which repeats all before it: of parts that wait, only the latest is asked for, and none
        once the reply ends. Not to be mixed with `write`.
        """

    def end(self, data: bytes) -> None:
        """Finish it with these last bytes, which may be empty."""

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written; at once where it keeps up or has gone."""


class Handler(Protocol):
    """Answers the calls of one route."""

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        """Answer a call through `writer`; returns what cancels it, None if the reply is complete. Raises ContractError:
        the call was refused before inference; the error holds the reply."""


class Running(Protocol):
    """Handle of a call whose reply is still coming."""

    def cancel(self) -> None:
        """Stop: the client has gone. Harmless when the reply is complete."""


_HEADER = SAGEMAKER_ADAPTER_IDENTIFIER_HEADER.lower()


def adapter_header(call: Call) -> str | None:
    """The adapter that SageMaker's header names: "" for the model itself, None without the header; the last counts."""
    return next((value.strip() for name, value in reversed(call.headers) if name.lower() == _HEADER), None)
