"""Holds a call against botocore's model of the service: what boto3 checks, and enumerations and patterns besides.

boto3 itself finds unknown and missing parameters, wrong types and lengths; a wrong instance type or a name that does
not match reaches the service. Here it is found before the first call.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.sagemaker.api_call import ApiCall, Reference

_FEW = 10
# Classes of characters that Python's `re` writes differently, or that are every character anyway.
_TRANSLATIONS = (
    (r"\u0020-\uD7FF\uE000-\uFFFD\uD800\uDC00-\uDBFF\uDFFF\r\n\t", r"\s\S"),
    (r"\p{L}\p{Z}\p{N}", r"\w\s"),
    (r"\p{Print}", r"[^\x00-\x1f]"),
)


def violations(call: ApiCall) -> tuple[str, ...]:
    """What of the call the service's model does not allow, a sentence for each; references count as right.

    Raises:
        AttributeError: the service has no such operation.
    """
    from botocore.validate import ParamValidator

    shape = input_shape(call.service, call.operation)
    parameters = _with_samples(call.parameters)
    report = ParamValidator().validate(parameters, shape).generate_report()
    found = [line for line in report.splitlines() if line]
    if isinstance(parameters, Mapping):
        found += _mismatches(parameters, shape, "")
    return tuple(f"{call.operation}: {line}" for line in found)


@functools.cache
def _session() -> Any:
    import botocore.session

    return botocore.session.get_session()


@functools.cache
def input_shape(service: str, operation: str) -> Any:
    """botocore's model of an operation's parameters.

    Raises:
        AttributeError: the service has no such operation.
    """
    from botocore import xform_name

    model = _session().get_service_model(service)
    for name in model.operation_names:
        if xform_name(name) == operation:
            return model.operation_model(name).input_shape
    raise AttributeError(f"{service} has no operation {operation}")


def _with_samples(value: Any) -> Any:
    if isinstance(value, Reference):
        return "arn:aws:autoscaling:eu-west-1:111122223333:scalingPolicy:reference"
    if isinstance(value, Mapping):
        return {key: _with_samples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_samples(item) for item in value]
    return value


def _mismatches(value: Any, shape: Any, path: str) -> Iterator[str]:
    if shape.type_name == "structure" and isinstance(value, Mapping):
        for key, item in value.items():
            if key in shape.members:
                yield from _mismatches(item, shape.members[key], f"{path}.{key}" if path else key)
    elif shape.type_name == "list" and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _mismatches(item, shape.member, f"{path}[{index}]")
    elif shape.type_name == "map" and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _mismatches(item, shape.value, f"{path}.{key}")
    elif shape.type_name == "string" and isinstance(value, str):
        yield from _wrong_text(value, shape, path)


def _wrong_text(value: str, shape: Any, path: str) -> Iterator[str]:
    if shape.enum and value not in shape.enum:
        yield f"{path} is {json.dumps(value)}; expected {_choices(value, shape.enum)}"
    longest = shape.metadata.get("max")
    if longest is not None and len(value) > longest:
        yield f"{path} has {len(value)} characters; expected at most {longest}"
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(pattern).match(value):
        yield f"{path} does not match {pattern}"


def _choices(value: str, choices: list[str]) -> str:
    if len(choices) <= _FEW:
        return "one of " + ", ".join(choices)
    close = difflib.get_close_matches(value, choices, n=3)
    return f"one of {len(choices)} values" + (f", such as {', '.join(close)}" if close else "")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    for theirs, ours in _TRANSLATIONS:
        pattern = pattern.replace(theirs, ours)
    return re.compile(rf"(?:{pattern})\Z" if not pattern.startswith("^") else pattern)
