"""Runs Slipway with requests that go to the copies in turn, for comparison with Slipway's own choice of the copy.

python -m benchmarks.copies_in_turn MODULE [ARGUMENTS...]
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Hashable, Sequence

from engines.vllm.copies.choice import AnyCopy, CopyChoice


def in_turn(
    choice: CopyChoice, copies: Sequence[AnyCopy], token_ids: Sequence[int], scope: Hashable, work: int
) -> AnyCopy:
    """Return the copy that was chosen least recently. This function replaces `CopyChoice.choose`."""
    return min(copies, key=lambda copy: copy.chosen)


if __name__ == "__main__":
    CopyChoice.choose = in_turn  # type: ignore[assignment, method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
