"""Shortens the list of actions of a failed run, by delta debugging."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.chaos.actions import Action


def shortest(actions: Sequence[Action], fails: Callable[[Sequence[Action]], bool], runs: int) -> Sequence[Action]:
    """Leave out the actions that a failure does not need.

    Args:
        actions: The actions of a run that has failed.
        fails: Runs actions, and returns True if the run fails as well.
        runs: The most runs.
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
