"""The tool-call parsers and reasoning parsers of vLLM."""
