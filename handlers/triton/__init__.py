"""Triton: the generate extension, and the KServe v2 routes that its clients call first."""
