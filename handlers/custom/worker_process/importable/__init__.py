"""A folder for PYTHONPATH. It makes only `djl_python` importable, and not the packages installed next to it."""
