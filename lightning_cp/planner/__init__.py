"""Memory, FLOPs, bytes and time of a run that has not happened: integers and sums, no process group."""
