"""``python -m lightning_cp.compare``: whether runs that should agree do, or which of several is better."""
