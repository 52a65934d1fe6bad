"""LMI's management of models and adapters."""
