"""SageMaker's custom attributes: a header that holds further properties of a call, as `name=value; name=value`.

The attribute `route` names the route that answers a call of `/invocations`, because most SageMaker clients can call no
other path. AWS's vLLM image also has this attribute, for all of its routes. Here the attribute can name only routes
that run inference or tokenize: a client of an endpoint must not load adapters or models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from handlers.contract import NOT_HELD
from handlers.deadline import HEADER as DEADLINE

CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_MOST_CHARACTERS = 1024  # SageMaker's limit.
# Maps each reply header that is copied into an attribute to the attribute's name and a short value. The short value is
# used if the header's value is too long. `#` stands for the list that has no room.
_ATTRIBUTES = {
    DEADLINE: (b"X-Slipway-Deadline", b"reached"),
    NOT_HELD.encode(): (b"X-Slipway-Not-Held", b"#"),
}
_SEPARATOR = re.compile(rb"[,;\s]+")  # AWS's image separates attributes with commas, LMI with semicolons.
_ROUTE = re.compile(rb"(?:^|[,;\s])route=([^,;\s]*)")
# A path without escapes, query, fragment, `//` and `..`.
_PATH = re.compile(rb"(/(?!\.\.?(/|$))[^/%?#\\\x00-\x20\x7f-\xff]+)+|/")


def attributes_of(header: bytes) -> Sequence[tuple[bytes, bytes]]:
    """Return the attributes of a header value, with names in lower case. Attributes without `=` are dropped, as in LMI.

    Semicolons separate attributes, as in LMI. If the attribute `route` is present, commas and white space separate
    attributes, too.
    """
    given = _SEPARATOR.split(header) if _ROUTE.search(header) else header.split(b";")
    pairs = [attribute.partition(b"=") for attribute in given]
    return [(name.strip().lower(), value.strip()) for name, equals, value in pairs if equals]


def named_route(header: bytes) -> bytes | None:
    """Return the value of the first `route` attribute if it is a path or a URL, else None."""
    found = _ROUTE.search(header)
    return found[1] if found is not None and (found[1].startswith(b"/") or b"://" in found[1]) else None


def with_attributes(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return a reply's headers, plus an attribute for each header that `_ATTRIBUTES` lists.

    SageMaker drops these headers, but forwards the attributes to the client. Existing attributes are kept. If there is
    too little room for a new attribute, its value is shortened, or the attribute is dropped.

    Args:
        headers: The headers of the reply, with names in lower case.
    """
    given = dict(headers)
    told = [name for name in _ATTRIBUTES if name in given]
    attributes = given.get(CUSTOM_ATTRIBUTES, b"")
    for name in told:
        attribute, short = _ATTRIBUTES[name]
        for value in (given[name], short):
            more = (attributes + b"; " if attributes else b"") + attribute + b"=" + value
            if len(more) <= _MOST_CHARACTERS:
                attributes = more
                break
    if not told:
        return headers
    return [*[pair for pair in headers if pair[0] != CUSTOM_ATTRIBUTES], (CUSTOM_ATTRIBUTES, attributes)]


def is_plain_path(route: bytes) -> bool:
    """Return True if a route is a path without escapes, query or fragment. Only such a route is looked up."""
    return _PATH.fullmatch(route) is not None
