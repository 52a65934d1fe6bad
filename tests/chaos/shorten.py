"""Shortens the action list of a failed run by delta debugging."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.chaos.actions import Action


def shortest(actions: Sequence[Action], fails: Callable[[Sequence[Action]], bool], runs: int) -> Sequence[Action]:
    """Remove the actions that are not needed for a failure.

    Args:
        actions: The actions of a run that failed.
        fails: Runs a list of actions, and returns True if this run fails, too.
        runs: The maximum number of runs.
    """
    parts = 2
    while len(actions) > 1:
        size = math.ceil(len(actions) / parts)
        for start in range(0, len(actions), size):
            if runs == 0:
                return actions
            runs -= 1
            fewer = [*actions[:start], *actions[start + size :]]
            if fails(fewer):
                actions, parts = fewer, max(parts - 1, 2)
                break
        else:
            if size == 1:
                return actions
            parts = min(len(actions), 2 * parts)
    return actions
