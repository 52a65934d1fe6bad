"""The console: a page at `/console` that sends requests in every contract, and shows the state of the server."""
