"""The engine for dynamic batches, on transformers."""
