"""`slipway replay`: sends recorded requests to a server, and compares the answers with another server's answers."""
