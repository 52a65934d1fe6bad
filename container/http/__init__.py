"""Passes an ASGI request to a handler, and writes the reply to the connection."""
