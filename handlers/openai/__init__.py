"""OpenAI's routes as vLLM serves them, in this process and around our engine."""

from handlers.openai.handler import OpenAIHandler, openai_handler

__all__ = ["OpenAIHandler", "openai_handler"]
