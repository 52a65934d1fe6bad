"""Reads the parts of requests that contracts share."""
