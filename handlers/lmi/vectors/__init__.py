"""LMI's vectors, scores and classes."""
