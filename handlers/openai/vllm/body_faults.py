"""The error messages for bodies that vLLM's Pydantic models refuse.

Pydantic reports errors for each type that a value may have. An item of `input` of `/v1/responses` may have 25 types,
and a wrong item gets 240 errors. This module reports only the error for the type that the client meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from handlers.parsing.json_fields import shown

_LONGEST = 1000  # The maximum number of characters of a message.


class _Fault(NamedTuple):
    """One of Pydantic's errors."""

    path: tuple[str | int, ...]  # The path of the value in the body.
    branch: tuple[str, ...]  # The types that Pydantic tried, for the values on the path that allow several types.
    message: str
    expected: str  # The allowed values of `type`, if the object's `type` is not one of them. Empty for other errors.


class BodyFault(NamedTuple):
    """The error of a body."""

    path: tuple[str | int, ...]  # The path of the wrong value. Empty if the whole body is wrong.
    message: str

    @property
    def dotted(self) -> str:
        """The path as Anthropic writes it: `messages.0.content`."""
        return ".".join(map(str, self.path))

    @property
    def indexed(self) -> str:
        """The path as OpenAI writes it: `input[0].content`."""
        return "".join([f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path]).removeprefix(".")


def body_fault(errors: Sequence[Any], body: Any) -> BodyFault:
    """Return the error that describes a refused body best.

    Args:
        errors: Pydantic's errors.
        body: The document.
    """
    if not errors or not isinstance(errors[0], dict):
        return BodyFault((), str(errors[0])[:_LONGEST] if errors else "the body cannot be read")
    if errors[0]["type"] == "json_invalid":
        return BodyFault((), f"the body is not JSON: {errors[0].get('ctx', {}).get('error', errors[0]['msg'])}")
    faults = [_fault(error, body) for error in errors]
    excluded = {fault.branch for fault in faults if fault.expected}
    meant = [fault for fault in faults if not fault.expected and not _is_below(fault.branch, excluded)]
    # Errors about the `type` of an object. Errors inside types that the client did not mean are left out.
    wrong = [fault for fault in faults if fault.expected and not _is_below(fault.branch[:-1], excluded)]
    deepest = max([*meant, *wrong], key=lambda fault: len(fault.path), default=faults[0])
    if not isinstance(body, dict):
        return BodyFault((), "the body must be a JSON object")
    if not deepest.expected:
        return BodyFault(deepest.path, deepest.message[:_LONGEST])
    values = [fault.expected for fault in wrong if fault.path == deepest.path]
    return BodyFault(deepest.path, f"{deepest.message} {' or '.join(dict.fromkeys(values))}"[:_LONGEST])


def _fault(error: dict[str, Any], body: Any) -> _Fault:
    """Split an error's location into the parts that are in the body and the parts that name a type."""
    path: list[str | int] = []
    branch: list[str] = []
    value, parts = body, error["loc"][1:]
    for place, part in enumerate(parts):
        if (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        ):
            value = value[part]
        elif place + 1 < len(parts) or error["type"] != "missing":
            branch.append(str(part))
            continue
        path.append(part)
    context = error.get("ctx", {})
    if branch and path and path[-1] == "type" and error["type"] == "literal_error":
        return _Fault(tuple(path), tuple(branch), f"Got {shown(value)}, should be", str(context["expected"]))
    message = str(context["error"]) if "error" in context else error["msg"]
    return _Fault(tuple(path), tuple(branch), message, "")


def _is_below(branch: tuple[str, ...], excluded: set[tuple[str, ...]]) -> bool:
    return any(branch[:length] in excluded for length in range(1, len(branch) + 1))
