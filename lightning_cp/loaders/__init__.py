"""Loaders that all ranks go through together, and their place in a run."""
