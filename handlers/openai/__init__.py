"""OpenAI's routes as vLLM serves them, in this process and around our engine."""
