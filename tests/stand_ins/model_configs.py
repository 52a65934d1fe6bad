"""Configurations of real models, copied from their config.json."""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
}
"""Llama 3 70B."""
