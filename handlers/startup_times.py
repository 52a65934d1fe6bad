"""How long the phases of a model's start take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class StartupTimes:
    """Seconds by phase, in the order in which the phases ended; the log and `/metrics` show them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs meanwhile; a phase that fails is not kept."""
        started = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
