"""Translates between request bytes and tokens: contracts and handlers. This package does not know the HTTP server."""
