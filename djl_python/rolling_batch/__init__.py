"""The base class for rolling batches that a handler or a test implements."""
