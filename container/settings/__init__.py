"""The settings of a server and of its models: options, their sources, and their checks."""
