"""The release of vLLM with which Slipway was run, and no other.

Slipway calls and replaces internals of vLLM in `engines.vllm` and `handlers.openai`; each module says which.
What it relies on is held by tests/live/*_seam.py. To move to another release: change `RELEASE` and pyproject.toml, run
those tests, and read these modules against vLLM's source. Nothing here imports vLLM.
"""

from __future__ import annotations

from engines.interface import EngineStartError

RELEASE = "0.32"


def check_release(installed: str) -> None:
    """Refuse to start on another release. Raises EngineStartError."""
    if not installed.startswith(f"{RELEASE}."):
        raise EngineStartError(f"vLLM {installed} is installed; Slipway was run with {RELEASE}.x only")
