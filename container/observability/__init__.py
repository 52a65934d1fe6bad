"""Logs, metrics and recorded requests."""
