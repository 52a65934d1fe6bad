"""LMI's service for vLLM."""
