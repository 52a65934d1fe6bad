"""Customers' formatters: loaded from their code, run in a thread, and in the way of replies."""
