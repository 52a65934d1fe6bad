"""Answers that several contracts use."""
