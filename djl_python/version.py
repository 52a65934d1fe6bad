"""The version of LMI's Python package whose interface this one has."""

__version__ = "0.36.0"
