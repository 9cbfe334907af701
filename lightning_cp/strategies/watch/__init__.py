"""Watches of a run: values that are not finite, signals, other ranks."""
