"""The release of vLLM with which Slipway was run.

Modules of `engines.vllm` and `handlers.openai` call and replace internals of vLLM, and list them in their docstrings.
The tests in tests/live/*_internals.py fail if one has moved. To change the release, set `RELEASE` and the version in
pyproject.toml, run those tests, and compare these modules with vLLM's source. This module does not import vLLM.
"""

from __future__ import annotations

from engines.interface import EngineStartError

RELEASE = "0.32"


def check_release(installed: str) -> None:
    """Refuse to start on another release.

    Raises:
        EngineStartError: Another release is installed.
    """
    if not installed.startswith(f"{RELEASE}."):
        raise EngineStartError(f"vLLM {installed} is installed; Slipway was run with {RELEASE}.x only")
