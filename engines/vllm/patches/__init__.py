"""Functions and methods of vLLM that Slipway replaces, in modules named by what they patch.

Each patch says why it is there, and with which release of vLLM it can go if that is known.
"""
