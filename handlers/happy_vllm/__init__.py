"""happy_vllm: the routes that generate, and the technical routes."""
