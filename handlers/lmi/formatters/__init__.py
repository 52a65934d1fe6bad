"""Customers' formatters for LMI's requests and answers."""
