"""Wire contracts, a package each: bytes to requests, deltas to bytes."""
