"""Prompts whose greedy answers are compared. The answers to the last prompts have characters of several tokens."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "Repeat after me: 你好，世界。你好，世界。你好，",
    "Repeat after me: 😀 😃 😄 😁 😀 😃 😄 😁 😀 😃",
)
MAX_NEW_TOKENS = 24
