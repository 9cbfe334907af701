"""The runtime of a context-parallel run, and the state of one step. Knows no Lightning."""
