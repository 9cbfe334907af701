"""One step of a run: its batch, its loss and what its values are worth, whoever drives it."""
