"""TEI, Text Embeddings Inference."""
