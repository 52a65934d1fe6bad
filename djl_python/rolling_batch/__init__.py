"""The base class for the rolling batches of handlers and tests."""
