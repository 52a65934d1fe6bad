"""Rolling batches that a handler, or a test, brings itself (contracts/lmi.md section 7.7)."""
