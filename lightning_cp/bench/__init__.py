"""Measurement of a machine: kernels, links, modes, compute and overheads. No test depends on it."""
