"""The code inside a worker process.

It imports the standard library and `djl_python` alone, because a worker's interpreter may have none of our packages.
`launch.py` loads this package by its location, as `slipway_worker`, so its own imports are relative.
"""
