"""The interfaces of contracts and handlers.

A contract is pure: it does no I/O and knows no engine and no HTTP server. `Contract.parse` turns a call into an
`Exchange`. The exchange's `Answer` turns the engine's deltas into the bytes of the reply. A handler answers a call by
writing such bytes to a `ReplyWriter`, without waiting for the client.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypedDict

import msgspec

from djl_python.input_parser import SAGEMAKER_ADAPTER_IDENTIFIER_HEADER
from engines.errors import InvalidParameter, RequestError
from engines.request import GenerationRequest, TokenDelta
from handlers.deadline import REACHED

JSON = "application/json"
WITHOUT_BODY = frozenset({204, 304})  # These statuses have no body and no `content-length` (RFC 9110, 8.6).
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_SALT_HEADER, _PRIORITY_HEADER = "X-Cache-Salt", "X-Vllm-Priority"
_PRIORITIES = range(-(1 << 31), 1 << 31)
_SALT = re.compile(r"[!-.0-?A-\[\]-~]{1,128}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
LONG_BODY = 256 * 1024  # Bytes. Longer bodies are decoded in a thread, so that no other request waits for them.
NOT_HELD = "x-slipway-not-held"
EXPLAIN, _EXPLAIN_HEADER = b"x-slipway-explain", "X-Slipway-Explain"
# The maximum number of characters of the places in the header `NOT_HELD`. SageMaker's custom attributes hold at most
# 1,024 characters. They also need room for the header's name and for the number of omitted places.
_MOST_PLACES = 990


def not_held_header(places: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the header that names the parts of a JSON schema that an answer might violate.

    Return no header if there are no such parts. The header lists as many places as fit, separated by commas. The number
    of omitted places follows: `#/a/contains,+12`.
    """
    if not places:
        return ()
    shown: list[str] = []
    free = _MOST_PLACES
    for place in places:
        free -= len(place) + 1
        if free < 0:
            shown.append(f"+{len(places) - len(shown)}")
            break
        shown.append(place)
    return ((NOT_HELD, ",".join(shown)),)


def media_type(content_type: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


class Steering(TypedDict, total=False):
    """The fields of a `GenerationRequest` that the headers of a call set. Most calls set none."""

    trace_context: Mapping[str, str]  # W3C Trace Context.
    cache_salt: str  # The client's salt, or else the salt of its API key.
    priority: int


def read_steering(headers: Mapping[bytes, bytes], key_salt: str = "") -> tuple[Steering, InvalidParameter | None]:
    """Read the headers that steer the engine.

    Args:
        headers: All headers, keyed by lower-case name.
        key_salt: The salt of the call's API key. Empty if the server has no keys.

    Returns:
        The fields, and the error if a header is invalid. A salt must be visible ASCII, and must be valid for vLLM in a
        body. A priority must be a 32-bit integer.
    """
    steering: Steering = {}
    fault = None
    salt = headers.get(b"x-cache-salt", b"").decode("latin-1")
    if salt and not _SALT.fullmatch(salt):
        expected = "must have at most 128 characters of visible ASCII, and no @, / or \\"
        fault = InvalidParameter(_SALT_HEADER, f"{expected}, got {salt[:20]!r}")
    elif salt or key_salt:
        steering["cache_salt"] = salt or key_salt
    if b"x-vllm-priority" in headers:
        priority = headers[b"x-vllm-priority"].decode("latin-1")
        if _INTEGER.fullmatch(priority) and int(priority) in _PRIORITIES:
            steering["priority"] = int(priority)
        elif fault is None:
            fault = InvalidParameter(_PRIORITY_HEADER, f"must be an integer of 32 bits, got {priority[:20]!r}")
    if b"traceparent" in headers or b"tracestate" in headers:
        given = [(name, headers[name]) for name in _TRACE_HEADERS if name in headers]
        steering["trace_context"] = {name.decode(): value.decode("latin-1") for name, value in given}
    return steering, fault


@dataclass(slots=True)
class ExplainAsked:
    """A request to explain a call instead of answering it. The steps that handle the call record their choices here."""

    contract: str = ""  # The name of the contract that read the body.
    because: list[str] = field(default_factory=list)  # The reasons, one sentence for each choice.
    ignored: list[str] = field(default_factory=list)  # Sentences about parameters without effect.
    way: str = ""  # The kind of the body, if it decides which handler answers.
    once: bool = False  # If True, the call must not be repeated: a customer's code has read it, or it has images.
    failed: bool = False  # If True, the engine has failed, so the result says nothing about the body.
    # If True, the call repeats an explained call with a changed body, to compare the engine's requests for the first
    # prompts of both calls.
    variant: bool = False


def asked_explanation(
    headers: Mapping[bytes, bytes], attributes: Sequence[tuple[bytes, bytes]]
) -> tuple[ExplainAsked | None, InvalidParameter | None]:
    """Read the header and the custom attribute that ask for an explanation. The header takes precedence.

    Returns:
        A pair. The first item is the explanation to fill in, or None if no explanation is requested. The second item is
        an error if the value is neither 1 nor 0.
    """
    given = headers.get(EXPLAIN)
    name = _EXPLAIN_HEADER
    if given is None:
        given, name = dict(attributes).get(b"explain", b"0"), "explain"
    if given in (b"1", b"0"):
        return (ExplainAsked() if given == b"1" else None), None
    return ExplainAsked(), InvalidParameter(name, f"must be 1 or 0, got {given[:20].decode('latin-1')!r}")


class Head(Protocol):
    """An HTTP request without its body, as the server has read it."""

    @property
    def method(self) -> str: ...

    @property
    def query(self) -> bytes: ...

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """All headers, keyed by lower-case name. If a name is repeated, the last header counts."""

    @property
    def attributes(self) -> Sequence[tuple[bytes, bytes]]:
        """SageMaker's custom attributes, with names in lower case."""

    @property
    def path_parameters(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An HTTP request with its whole body."""

    body: bytes
    content_type: str = ""  # The header with its parameters. Empty if absent.
    request_id: str
    # All headers, keyed by lower-case name. If a name is repeated, the last header counts.
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    query: tuple[tuple[str, str], ...] = ()  # The decoded query parameters, in order.
    method: str = "POST"
    path: str = ""  # The decoded path, without the query.
    # The variable parts of the path, keyed by the names that the route gives them.
    path_parameters: Mapping[str, str] = field(default_factory=dict)
    # The fields of the body's JSON object, each still encoded. None if the body was not split into fields yet.
    fields: Mapping[str, msgspec.Raw] | None = None
    key_salt: str = ""  # A text that differs for each API key. Empty if the server has no keys.
    # The results of `read_steering`. Every contract puts the fields into its requests.
    steering: Steering = field(default_factory=Steering)
    steering_fault: InvalidParameter | None = None  # If set, the call is refused with this error.
    explanation: ExplainAsked | None = None  # If set, nothing is generated, and the reply is the explanation.
    arrived_at: float = field(default_factory=time.monotonic)  # The arrival time of the head, on the monotonic clock.
    time_limit: float | None = None  # Seconds from `arrived_at` until the call ends with its text so far.
    # Whether a custom handler makes the call. The deadline of streams then applies even to a whole answer, because the
    # handler may stream this answer to its own client.
    from_handler: bool = False

    def header(self, name: str) -> str | None:
        """Return the value of a header. `name` may have any case."""
        value = self.headers.get(name.lower().encode())
        return None if value is None else value.decode("latin-1")


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP reply."""

    status: int
    content_type: str  # If empty, the reply has no `content-type` header.
    body: bytes
    # Further headers, in Latin-1. They replace headers of the same name that the server adds to every reply.
    headers: tuple[tuple[str, str], ...] = ()


def ended_at_deadline(error: Reply) -> Reply:
    """Return the error reply with a further header. The header says that the call had no token at its deadline."""
    return replace(error, headers=(*error.headers, *REACHED))


class ContractError(Exception):
    """A call was refused. The error holds the reply in the contract's format."""

    def __init__(self, reply: Reply, reason: str) -> None:
        super().__init__(reason)
        self.reply = reply
        self.reason = reason  # The reason for the log, which never contains the prompt.


class Answer(Protocol):
    """Turns the deltas of one call into the bytes of its reply."""

    content_type: str
    cumulative: bool = False  # If True, each part repeats all earlier parts. A slow client needs only the latest part.
    blocks: bool = False  # Whether `feed` runs a customer's formatter, which may block.
    headers: tuple[tuple[str, str], ...] = ()  # Further headers of the reply. They are read when the reply begins.

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the bytes that a delta adds to the body.

        The bytes may be empty. In a cumulative answer, a later part may replace these bytes. The bytes of the last
        delta are never replaced.

        Args:
            prompt: The position of the delta's request in `Exchange.requests`.
            delta: The delta.

        Raises:
            RequestError: The call ends with this error.
        """

    def latest(self) -> bytes:
        """For a cumulative answer: return the next part, which repeats the whole answer so far. Empty if unchanged."""
        return b""

    def fail(self, error: RequestError) -> Reply:
        """Return the error reply for a call whose reply has not begun."""

    def fail_midway(self, error: RequestError) -> bytes:
        """Return the last bytes of a body that has begun with status 200. Empty if bodies are sent whole."""
        return b""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A parsed call: requests for the engine, and the answer that their deltas make."""

    requests: tuple[GenerationRequest, ...]  # One for each prompt. `Answer.feed` gets a request's position.
    answer: Answer
    notes: tuple[str, ...] = ()  # Log lines about ignored parameters.
    images: tuple[str, ...] = ()  # The URLs of the images, in the order of their placeholders in the prompt.
    # Maps the engine's parameter names to the client's names, if they differ. The client sees its own names in errors.
    names: Mapping[str, str] = field(default_factory=dict)
    # An idle stream sends this comment. A stream with a comment begins before the first token. A cumulative answer has
    # no comment.
    comment: bytes = b""
    model_defaults: Collection[str] = ()  # vLLM's names of the parameters whose defaults come from the model.


class Contract(Protocol):
    """One wire format."""

    def parse(self, call: Call) -> Exchange:
        """Parse a call.

        Raises:
            ContractError: The call is refused. The error holds the reply.
            RequestError: The call is refused. `ContractRoutes.refuse` makes the reply.
        """


class ReplyWriter(Protocol):
    """Sends one reply.

    Only `drain` waits for the client. The other methods return at once: the writer buffers and merges the parts for a
    slow client. If the buffer would grow too large, the writer closes the connection, and the call is cancelled.
    """

    def reply(self, reply: Reply) -> None:
        """Send a whole reply."""

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Begin a reply of unknown length. If `content_type` is empty, the reply has no such header."""

    def write(self, data: bytes) -> None:
        """Add a part to the body."""

    def write_latest(self, part: Callable[[], bytes]) -> None:
        """Add the result of `part`, either now or once the client has read the earlier parts.

        Use this method for answers in which each part repeats all earlier parts. If several functions wait, only the
        latest function is called. No function is called after the reply has ended. Do not mix this method with `write`.
        """

    def end(self, data: bytes) -> None:
        """Finish the reply with these last bytes, which may be empty."""

    async def drain(self) -> None:
        """Wait until the client has read most of the reply. Return at once if the client keeps up or is gone."""


class Handler(Protocol):
    """Answers the calls of one route."""

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        """Answer a call through `writer`.

        Returns:
            The running call, or None if the reply is complete.

        Raises:
            ContractError: The call is refused. The error holds the reply.
        """


class Running(Protocol):
    """A call whose reply is not complete."""

    @property
    def request_id(self) -> str:
        """The call's id in the reply and in the log: the id of its head, or the `request_id` of an OpenAI body.

        It may be empty if the call is already complete.
        """

    def cancel(self) -> None:
        """Stop, because the client has disconnected. Do nothing if the reply is complete."""


_ADAPTER_HEADER = SAGEMAKER_ADAPTER_IDENTIFIER_HEADER.lower().encode()


def adapter_header(call: Call) -> str | None:
    """Return the adapter that SageMaker's header names.

    Returns:
        The name. An empty string means the model itself. None means that the call has no such header.
    """
    name = call.headers.get(_ADAPTER_HEADER)
    return None if name is None else name.decode("latin-1").strip()
