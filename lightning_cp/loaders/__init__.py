"""Synchronized loaders (all ranks iterate in step), their positions and random states."""
