"""The start of a run's processes, what they hand back, and signals that end them early."""
