"""The code that runs inside a worker process and calls the customer's handler.

It imports only the standard library and `djl_python`, because a worker's interpreter may have none of the server's
packages. `launch.py` loads this package by its location, as `slipway_worker`, so imports inside it are relative.
"""
