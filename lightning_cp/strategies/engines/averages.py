"""Gradients that no wrapper averages, averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.comm.reduce import all_sum


def average_present(
    parameters: Sequence[nn.Parameter], control: dist.ProcessGroup, group: dist.ProcessGroup
) -> None:
    """Average what there is of gradients; what is averaged already stays the same.

    A rank without a gradient counts as zeros; where no rank has one it stays ``None``.

    Args:
        parameters: in the same order on all ranks.
        control: carries, on the CPU, which of them have gradients.
        group: the same ranks; carries the gradients.
    """
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    counts = all_sum(flags, control).tolist() if parameters else []
    for parameter, count in zip(parameters, counts, strict=True):
        if count:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = all_sum(own, group) / group.size()
