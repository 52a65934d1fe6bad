"""vLLM's parsers of tool calls and reasoning."""
