"""Logging: the values of ranks become the one that one process would show."""
