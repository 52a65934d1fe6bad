"""transformers as an engine, for dynamic batches."""
