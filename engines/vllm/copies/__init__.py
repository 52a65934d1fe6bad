"""Copies of the model: several engine processes of vLLM that serve as one engine."""
