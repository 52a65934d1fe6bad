"""What a local endpoint is to serve, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """One container and all that stands in front of it. Limits are the platform's: sagemaker_hosting.md section 2."""

    container: str
    """Base URL."""
    endpoints: tuple[str, ...]
    components: frozenset[str] = frozenset()
    """Inference components that are the base model. If there are any, a call has to name one, as on the platform."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Inference components that are an adapter, with what it is loaded from; "": the container has it already."""
    models_dir: Path | None = None
    """Where `TargetModel` is looked for."""
    async_output: str | None = None
    """A folder or `s3://bucket/prefix`; None: no asynchronous invocations."""
    max_payload: int = 25 * MEBIBYTE
    """Bytes of a request, and of an answer that is not streamed."""
    answer_timeout: float = 60.0
    """Seconds until an answer is complete, or until the first byte of a stream."""
    stream_timeout: float = 480.0
    """Seconds until a stream is complete."""
    max_connections: int = 512
    """To the container; a call beyond that waits a little and is refused then."""
