"""From bytes to tokens and back: contracts, handlers, engines. Knows no HTTP server."""
