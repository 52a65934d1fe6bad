"""A recorded request, and the reply that a server gave it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from container.observability.traffic_capture import recorded_headers

Headers = tuple[tuple[str, str], ...]

HEADER_NAME = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
ROUTE = re.compile(r"(?:^|[,;\s])route=(/[^,;\s]*)")

_JSON = "application/json"
_TGI = re.compile(r"/(generate|generate_stream)?")
# TGI's parameters that enable sampling. If a body has `parameters` without any of these, TGI takes the most probable
# tokens.
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "typical_p")
_PROMPTS = ("inputs", "messages", "prompt", "model")  # Even if they are empty, these fields tell the body's schema.
_STREAMING_PATH = re.compile(r"/(generate_stream|invocations-response-stream)$")
# Headers of the recorded connection. They are not sent: the replay's HTTP client sets its own headers, and with
# `accept-encoding`, replies could be compressed.
_OF_CONNECTION = frozenset(
    (
        *("host", "connection", "keep-alive", "transfer-encoding", "content-length", "expect", "te", "upgrade"),
        *("accept-encoding", "proxy-connection"),
    )
)
# Headers that identify the recorded call. They are not sent: the server may already know the id, and the call would
# appear twice in traces.
_OF_CALL = frozenset(
    ("x-request-id", "x-amzn-sagemaker-inference-id", "x-amzn-trace-id", "traceparent", "tracestate", "baggage")
)
# Paths of POST requests that load, unload, stop or pause something, in LMI, vLLM or Triton.
_MANAGEMENT = re.compile(
    r"/(models|workflows|(models/[^/]+/)?adapters(/.+)?"
    r"|(v1/)?(un)?load_lora_adapter|(v1/)?abort_requests?|sleep|wake_up|pause|resume|collective_rpc|scale_elastic_ep"
    r"|fault_tolerance/.+|weight_checker|release_kv_cache_memory|(reset|start|stop|finish|update|init|shutdown)_\w+"
    r"|v2/repository/.+|v2/.*sharedmemory.*|v2/(models/.+/)?trace/setting|v2/logging)"
)
_CHANGING_METHODS = ("PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of a server, recorded or received."""

    status: int
    headers: Headers  # The names are in lower case.
    body: bytes
    headers_known: bool = True  # False: `headers` contains only the content type.
    complete: bool = True
    seconds: float | None = None
    first_byte: float | None = None  # Seconds until the first byte of the body arrives.

    @property
    def content_type(self) -> str:
        """The value of the header, or an empty string."""
        return next((value for name, value in self.headers if name == "content-type"), "")


@dataclass(frozen=True)
class RecordedRequest:
    """A request of a source."""

    id: str
    place: str  # The file and the line. Two requests may share an id, but not a place.
    method: str
    path: str  # Includes the query.
    headers: Headers  # The names are in lower case.
    body: bytes
    reply: Reply | None = None
    time: float | None = None  # Seconds since 1970.

    @property
    def key(self) -> str:
        return f"{self.place} {self.id}"

    @cached_property
    def route(self) -> str:
        """The route in SageMaker's custom attributes, or else the path without the query."""
        named = ROUTE.search(self.header(CUSTOM_ATTRIBUTES))
        return named[1] if named else self.path.partition("?")[0]

    @property
    def is_management(self) -> bool:
        """True if the request may change the server: its models, adapters, engine or stored data."""
        paths = (re.sub("//+", "/", unquote(path)) for path in (self.path.partition("?")[0], self.route))
        named = any(_MANAGEMENT.fullmatch(path.rstrip("/")) for path in paths)
        return self.method in _CHANGING_METHODS or (named and self.method == "POST")

    def header(self, name: str) -> str:
        """Return the value of a header, or an empty string. `name` is in lower case."""
        return next((value for given, value in self.headers if given == name), "")

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The fields of a JSON body. Empty if the body is not a JSON object."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def streams(self) -> bool:
        """True if the request asks for a stream."""
        return self.fields.get("stream") is True or _STREAMING_PATH.search(self.route) is not None

    @cached_property
    def greedy(self) -> bool:
        """True if the request certainly asks for greedy decoding, so that the same model generates the same text."""
        parameters = [self.fields, *(self.fields.get(name) for name in ("parameters", "sampling_parameters"))]
        given = [fields for fields in parameters if isinstance(fields, dict)]
        temperatures = [fields["temperature"] for fields in given if fields.get("temperature") is not None]
        if any(isinstance(value, int | float) and value == 0 for value in temperatures):
            return True
        if any(fields.get("do_sample") is False for fields in given) and not temperatures:
            return True
        of_tgi = self.fields.get("parameters") if _TGI.fullmatch(self.route) else None
        return isinstance(of_tgi, dict) and not any(of_tgi.get(name) for name in _SAMPLING)

    def asks(self, field: str) -> bool:
        """Return True if the body contains this field at any depth with a value that asks for something.

        Null, false, zero, an empty value and the format `text` ask for nothing: without the field, a server behaves the
        same.
        """
        values = (found.get(field) for found in objects_in(self.fields))
        if field in _PROMPTS:
            return any(value is not None for value in values)
        return any(value and value != {"type": "text"} for value in values)

    def has_zero(self, field: str) -> bool:
        """Return True if the body contains this field with the number 0, at any depth."""
        return any(found.get(field) == 0 and found[field] is not False for found in objects_in(self.fields))

    @cached_property
    def has_null(self) -> bool:
        """True if any field of the body is null."""
        return any(value is None for found in objects_in(self.fields) for value in found.values())

    def without_unknown_headers(self, passed: Collection[str]) -> tuple[RecordedRequest, list[str]]:
        """Remove headers that may be credentials for the old server. Return the new request and the removed names.

        A header is kept if a capture by this release would record it.

        Args:
            passed: The names of further headers to keep, in lower case.
        """
        names = {name for name, _ in self.headers}
        known = {name.decode() for name, _ in recorded_headers((name.encode(), b"") for name in names)}
        unknown = names - known - set(passed) - _OF_CONNECTION - _OF_CALL
        if not unknown:
            return self, []
        return replace(self, headers=tuple(pair for pair in self.headers if pair[0] not in unknown)), sorted(unknown)

    def to(self, path: str, headers: Iterable[tuple[str, str]]) -> RecordedRequest:
        """Return the request with a target's path and headers. These headers replace headers of the same name.

        Headers of the recorded connection and call are removed, and so is the recorded reply.
        """
        more = tuple((name.lower(), value) for name, value in headers)
        names = {name for name, _ in more}
        dropped = names | _OF_CONNECTION | _OF_CALL
        kept = tuple(pair for pair in self.headers if pair[0] not in dropped)
        return replace(self, path=path, headers=(*kept, *more), reply=None)


def encodable(text: str) -> str:
    """Return a text without lone surrogates, which JSON may contain but UTF-8 may not."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Return a text without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def objects_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a JSON value, at any depth."""
    level = [value]
    while level:
        objects = [item for item in level if isinstance(item, dict)]
        yield from objects
        lists = [item for item in level if isinstance(item, list)]
        level = [part for item in objects for part in item.values()] + [part for item in lists for part in item]


def with_content_type(headers: Headers) -> Headers:
    """Return the headers, and add JSON's content type if they have none."""
    return headers if any(name == "content-type" for name, _ in headers) else (("content-type", _JSON), *headers)
