"""Custom handlers: the server's side of the worker processes that run a customer's `model.py`."""
