"""Calls of a custom handler, each with one request, a dynamic batch, or all active requests of a rolling batch."""
