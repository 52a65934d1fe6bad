"""The memory of the machine and of its GPUs, and the memory that a model needs."""
