"""Loaders that ranks go through together: who reads, in which order, and what is refused."""
