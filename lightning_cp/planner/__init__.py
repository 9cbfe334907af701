"""Predictions of a run's memory, FLOPs, traffic and time, in integers and sums; needs no process group."""
