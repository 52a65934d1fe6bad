"""Replaces functions and methods of vLLM. Each module is named after the part of vLLM that it patches.

The docstring of each patch gives its reason. According to its source code, vLLM 0.33 still needs all of these patches.
But it makes two other workarounds unnecessary: the environment variable that `async_llm.begin_output` caches, and
`arguments.from_settings.EMPTY_SLOTS_ON_CPU`.
"""
