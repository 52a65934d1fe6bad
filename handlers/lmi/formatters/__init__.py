"""Customers' formatters in LMI's answers."""
