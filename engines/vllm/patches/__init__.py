"""Functions and methods of vLLM that Slipway replaces, in modules named by what they patch.

Each patch says why it is there. By its sources, vLLM 0.33 needs all of them as well. It does two other things itself:
`async_llm.begin_output` need not keep a variable of the environment, and `arguments.from_settings.EMPTY_SLOTS_ON_CPU`
can go.
"""
