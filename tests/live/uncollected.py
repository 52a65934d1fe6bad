"""The program `slipway` without automatic collection of reference cycles.

python -m tests.live.uncollected serve
"""

from __future__ import annotations

import gc
from unittest.mock import patch


def main() -> None:
    from slipway.cli import app

    collect = gc.collect
    gc.disable()
    patch.object(gc, "enable", lambda: None).start()
    # Pydantic leaves reference cycles that hold the messages of a chat. The end of a call with a long body collects the
    # young objects.
    patch.object(gc, "collect", lambda generation=2: 0 if generation else collect(generation)).start()
    app()


if __name__ == "__main__":
    main()
