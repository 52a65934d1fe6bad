"""TGI, Text Generation Inference."""
