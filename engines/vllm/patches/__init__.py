"""Replaces functions and methods of vLLM. Each module is named after the part of vLLM that it patches.

The docstring of each patch gives its reason. According to its source code, vLLM 0.33 still needs all of these patches.
But vLLM 0.33 makes two other workarounds unnecessary: the line of `async_llm.begin_output` that caches an environment
variable, and `arguments.from_settings.EMPTY_SLOTS_ON_CPU`.
"""
