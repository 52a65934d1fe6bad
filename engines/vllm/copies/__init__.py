"""Copies of the model: several vLLM engines that serve as one engine."""
