"""From an ASGI request to a handler, and the reply back to the connection."""
