"""A customer's handler in worker processes, seen from the server."""
