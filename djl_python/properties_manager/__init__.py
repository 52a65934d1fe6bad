"""The settings of a model, as LMI's handlers have them."""
