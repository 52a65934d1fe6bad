"""Wire contracts, one file each: bytes to requests, deltas to bytes."""
