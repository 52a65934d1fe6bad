"""Runs a program of Slipway.

After a failed start, the program stays up until it is told to stop. Otherwise it would stay up for only three seconds.

python -m tests.live.failed_start MODULE [ARGUMENTS...]
"""

from __future__ import annotations

import runpy
import sys
from unittest.mock import patch

from container import server

if __name__ == "__main__":
    patch.object(server, "_FAILED_SECONDS", 3600.0).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
