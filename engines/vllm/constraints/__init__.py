"""Constraints on the text of an answer, as vLLM's structured outputs."""
