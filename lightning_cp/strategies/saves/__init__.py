"""Saves and loads of the two strategies: their hooks over ``lightning_cp.checkpoint``."""
