"""happy_vllm: its generating and its technical routes."""
