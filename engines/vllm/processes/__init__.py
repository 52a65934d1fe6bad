"""The start and the end of vLLM's processes."""
