"""vLLM as an engine.

Attributes:
    RELEASE: The release of vLLM for which this package is written. `engines.engine_choice` refuses any other release.
"""

RELEASE = "0.32"
