"""The images, audio and videos of requests: downloads, limits, and how vLLM loads media."""
