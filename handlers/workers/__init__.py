"""A customer's handler in worker processes: the server's side of them."""
