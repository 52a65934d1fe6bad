"""`slipway replay`: sends recorded requests to a server, and compares the answers with those of another one."""
