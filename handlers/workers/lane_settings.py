"""What a lane needs to know of a model's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Durations are in seconds."""

    predict_timeout: float
    client_patience: float
    """Seconds that a client may take nothing of its stream."""
    unavailable_status: int
    async_mode: bool = False
    concurrency: int = 1
    """Calls that one worker has at a time."""
    batch_size: int = 1
    max_batch_delay: float = 0.0
    max_rolling_batch_size: int = 32
    cancel_patience: float = 5.0
    """An async handler that does not let go of a cancelled call within this time is taken to hang."""
