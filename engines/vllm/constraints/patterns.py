"""Regular expressions that llguidance cannot take, expressed otherwise."""

from __future__ import annotations

from collections.abc import Collection


def complement(_: str) -> str | None:
    """Return an expression that is found in exactly the texts in which a given one is not; None if there is none."""
    return None


def none_of(_: Collection[str]) -> str | None:
    """Return an expression of all texts that are none of some; None if there is none."""
    return None


def without_look_around(_: str) -> tuple[str, ...] | None:
    """Return expressions that mean the same together as one with look-arounds; None if there are none."""
    return None
