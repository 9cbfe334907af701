"""The parity check as strategies run it: passes over a prefix of a batch, and a model left as it was."""
