"""Engines (ddp, fsdp, hsdp, zero1, tensor parallelism): where the model is, and the mean of its gradients."""
