"""Rolling batches that a handler, or a test, brings itself."""
