"""Engines (ddp, fsdp, hsdp, zero1, tensor parallelism): placement of a model and the mean of its
gradients.
"""
