"""The memory of the machine and of its GPUs, and what a model needs of it."""
