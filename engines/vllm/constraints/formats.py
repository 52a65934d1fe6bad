"""The standard string formats of JSON schemas, as regular expressions.

llguidance itself supports some of these formats. By the standard, a format that the standard does not define is an
annotation, so it is ignored. `regex` and the formats of international e-mail addresses and host names are also ignored,
because no exact expression exists for them.

Source: RFC 3339, 3986, 3987, 4122, 6570, 6901; relative JSON pointers: draft-bhutton-relative-json-pointer.
"""

from __future__ import annotations

from collections.abc import Mapping

_OF_LLGUIDANCE = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri"})

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:[0-9]{{4}}-(?:{_DAY})|{_LEAP_YEAR}-02-29)"
_HOUR, _FRACTION = "(?:[01][0-9]|2[0-3])", r"(?:\.[0-9]+)?"
# A leap second (`:60`) is valid only at the end of a UTC day.
_TIME = f"(?:{_HOUR}:[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-]{_HOUR}:[0-5][0-9])|23:59:60{_FRACTION}[zZ])"
_OCTET = "%[0-9A-Fa-f]{2}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = rf"(?:[A-Za-z0-9_]|{_OCTET})(?:\.?(?:[A-Za-z0-9_]|{_OCTET}))*(?::[1-9][0-9]{{0,3}}|\*)?"
_NOT_ASCII = r"\u{A0}-\u{D7FF}\u{F900}-\u{FDCF}\u{FDF0}-\u{FFEF}\u{10000}-\u{1FFFD}"


def _identifier(letters: str, *, relative: bool) -> str:
    """Return the expression for URIs. With further `letters`, it is for IRIs. If `relative`, the scheme is optional."""
    plain = rf"A-Za-z0-9\-._~!$&'()*+,;={letters}"
    character, segments = rf"(?:[{plain}:@]|{_OCTET})", rf"(?:/(?:[{plain}:@]|{_OCTET})*)*"
    host = rf"(?:\[(?:[0-9A-Fa-f]{{1,4}}:){{7}}[0-9A-Fa-f]{{1,4}}\]|(?:[{plain}]|{_OCTET})*)"
    rooted = rf"//(?:(?:[{plain}:]|{_OCTET})*@)?{host}(?::[0-9]*)?{segments}|/(?:{character}+{segments})?"
    with_scheme = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{rooted}|{character}+{segments})?"
    rest = rf"(?:\?(?:{character}|[/?])*)?(?:#(?:{character}|[/?])*)?"
    without_scheme = rf"(?:{rooted}|(?:[{plain}@]|{_OCTET})+{segments})?"
    return (rf"(?:{with_scheme}|{without_scheme})" if relative else with_scheme) + rest


# Each expression matches the whole text.
EXPRESSIONS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri-reference": _identifier("", relative=True),
    "iri": _identifier(_NOT_ASCII, relative=False),
    "iri-reference": _identifier(_NOT_ASCII, relative=True),
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "uri-template": rf"(?:[^\x00-\x20\x7f\"'%<>\\^`{{|}}]|{_OCTET}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*",
}


def is_known(name: str) -> bool:
    """Return True if a format is enforced."""
    return name in EXPRESSIONS or name in _OF_LLGUIDANCE
