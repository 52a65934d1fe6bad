"""The arguments of vLLM's engine and of vLLM's front end."""
