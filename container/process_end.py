"""The last step of the process, in place of the interpreter's own.

A daemon thread may still be in a model's code by then, such as that of a batch for which no drain waits. The
interpreter ends it there, and a library in C++ answers by aborting the process: its exit code would be 134, whatever
ours is.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys


class ProcessEnd:
    """Ends the process with `code`, once that is known, after all that others have registered to be done at its end.

    To be made first: functions that are registered later run earlier.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self.code is None:
            return
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)
