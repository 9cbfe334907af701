"""Random numbers of a step: independent per token, and equal for a row on all ranks that hold it."""
