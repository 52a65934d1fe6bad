"""What runs inside a worker process.

Imports the standard library and `djl_python` alone, because the worker's interpreter may have none of our packages.
`launch.py` loads this package by its location, under another name; so imports within it are relative.
"""
