"""The doctor: the parity check of one step, as a program."""
