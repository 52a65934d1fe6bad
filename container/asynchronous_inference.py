"""LMI's inference routes, which refuse DJL Serving's asynchronous inference: no answer is kept for a later request."""

from __future__ import annotations

from collections.abc import Iterator

from container.http.request_head import Scope
from container.http.route import FixedReplyRoute, HttpRoute
from container.invocations import InvocationsRoute
from container.route_attribute import CUSTOM_ATTRIBUTES, attributes_of
from handlers.djl_errors import front_end_reply

_SYNCHRONOUS, _TOKEN = b"x-synchronous", b"x-starting-token"
_REFUSAL = (
    "asynchronous inference (x-synchronous: false, x-starting-token) is not served: leave it out, and the answer has "
    "the result"
)


class SynchronousRoute(InvocationsRoute):
    """One of LMI's inference routes. It answers 400 to a call that asks for an answer by token."""

    def chosen(self, scope: Scope) -> HttpRoute:
        route = super().chosen(scope)
        if (
            isinstance(route, SynchronousRoute)
            and scope["method"] != "OPTIONS"
            and any(map(_is_asynchronous, _properties(scope)))
        ):
            return FixedReplyRoute(self.state, self.path, front_end_reply(400, "BadRequestException", _REFUSAL))
        return route


def _properties(scope: Scope) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers, with SageMaker's custom attributes in place of their header."""
    for name, value in scope["headers"]:
        if name != CUSTOM_ATTRIBUTES:
            yield name, value
            continue
        for attribute in attributes_of(value):
            key, equals, text = attribute.partition(b"=")
            if equals:
                yield key.strip().lower(), text.strip()


def _is_asynchronous(given: tuple[bytes, bytes]) -> bool:
    name, value = given
    return name == _TOKEN or (name == _SYNCHRONOUS and value.lower() != b"true")
