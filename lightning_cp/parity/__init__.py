"""The doctor: compares a model's step on one process with the context-parallel one, and finds the cause of a
difference.
"""
