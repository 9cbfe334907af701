"""Bytes that are read and written beside matrix products, as the planner counts them.

``python -m lightning_cp.bench 'suites=[compute]'`` measures how many of these bytes a device moves a second,
so what they leave out, such as what an operator reads twice, is in the rate.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_cp.planner.activations import RankStep, layer_bytes
from lightning_cp.planner.job import OPTIMIZERS

READS_FORWARD, READS_BACKWARD = 2, 3
"""How often what forward makes is read or written: made and used; used, and its gradient made and used."""
LOGIT = 4
"""Bytes: the loss is computed in float32."""
BUCKET = 4
"""How often an engine that copies gradients to what it sends reads or writes one: there and back."""


def layer_moved(step: RankStep) -> float:
    """Of norms, rotary positions, activations and residuals of one layer, forward and backward."""
    made = layer_bytes(replace(step, tiled_mlp=0)).total * step.tokens
    return ((1 + step.recomputes) * READS_FORWARD + READS_BACKWARD) * made


def loss_moved(vocabulary: int, tokens: int) -> float:
    """Of the cross-entropy: logits, and what they are less the logarithm of their sum."""
    return (READS_FORWARD + READS_BACKWARD) * 2 * LOGIT * vocabulary * tokens


def optimizer_moved(parameters: float, itemsize: int, optimizer: str) -> float:
    """Read and written: the parameter and each state; read: the gradient."""
    return parameters * itemsize * (2 * (1 + OPTIMIZERS[optimizer]) + 1)


def bucket_moved(parameters: float, itemsize: int) -> float:
    """Of gradients that an engine copies to what it sends, and back."""
    return parameters * itemsize * BUCKET
