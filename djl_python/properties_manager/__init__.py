"""The settings of a model for LMI's handlers."""
