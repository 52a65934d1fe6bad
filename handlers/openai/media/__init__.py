"""Images, sounds and videos of requests: their download, their limits, and how vLLM loads them."""
