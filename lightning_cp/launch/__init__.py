"""Launching of a run's processes, their results, and signals that end them early."""
