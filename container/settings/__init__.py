"""The settings of a server and of its models: options, where they are read from, and how they are checked."""
