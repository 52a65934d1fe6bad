"""A folder for PYTHONPATH. It makes `djl_python` importable, and nothing that is installed beside `djl_python`."""
