"""LMI on `/invocations` and `/predictions`: rolling batch, dynamic batch, formatters, chat, the asynchronous schema."""
