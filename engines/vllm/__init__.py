"""vLLM as an engine.

Attributes:
    RELEASE: The release of vLLM that this package is written for. `engines.engine_choice` refuses to start another one.
"""

RELEASE = "0.32"
