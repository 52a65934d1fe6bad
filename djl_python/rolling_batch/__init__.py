"""The base class of rolling batches that a handler or a test implements."""
