"""Batches of requests for a customer's handler, and calls with one request."""
