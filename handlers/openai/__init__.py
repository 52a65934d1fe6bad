"""OpenAI's routes as vLLM serves them. Slipway's contract answers common calls, and vLLM's front end the others."""
