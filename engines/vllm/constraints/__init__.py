"""Constraints on an answer's text, as vLLM's structured outputs."""
