"""Programs: train, compare, plan and doctor, each with ``python -m lightning_cp.<name>``, and their data."""
