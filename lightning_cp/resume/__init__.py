"""Exact resume: random numbers of every rank, the position of every loader, windows of accumulation.

Weights, optimizers and counters are Lightning's and ``checkpoint``'s. What is added here is plain: dicts,
lists, numbers, strings and tensors on the CPU, the same on all ranks, with every rank's part in it.
"""
