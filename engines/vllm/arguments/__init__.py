"""The arguments of vLLM's engine and of its front end."""
