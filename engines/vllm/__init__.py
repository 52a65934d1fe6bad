"""vLLM as an engine.

Attributes:
    RELEASE: The release of vLLM that this package is written for. `engines.choice` refuses to start another one.
"""

RELEASE = "0.32"
