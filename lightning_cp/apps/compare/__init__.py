"""``python -m lightning_cp.compare``: a check that runs agree, or a ranking of groups of runs."""
