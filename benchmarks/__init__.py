"""Research benchmarks: peers, studies of memory, length and balance. Not in the wheel."""
