"""vLLM's processes."""
