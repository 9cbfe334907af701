"""``python -m lightning_cp.compare``: whether runs that should agree do, and what each of them costs."""
