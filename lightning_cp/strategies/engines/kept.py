"""Gradients that DistributedDataParallel has left on their ranks, for a later backward to average."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.comm.vote import tally, vote

WHAT = "gradients that were left on their ranks"


class KeptBack:
    """Of one wrapped model: what backward has left without averaging, as long as it is the same tensor."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # the gradient's id, by that of its parameter
        self._averages = False
        self.follows = False
        """The program has left some, ever; so it has on all ranks."""

    def begins(self, module: nn.Module, *, averages: bool) -> None:
        """A backward does, which averages gradients if it comes to this model, or leaves them."""
        self._averages = averages
        if not averages and not self.follows:
            self.follows = True  # most programs never get here, and have no hooks
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note)

    def among(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of them whose gradient no backward has averaged."""
        if not self._left:
            return []
        return [p for p in parameters if p.grad is not None and self._left.get(id(p)) == id(p.grad)]

    def _note(self, parameter: torch.Tensor) -> None:
        if self._averages:
            self._left.clear()  # all of the model's are averaged together
        elif parameter.grad is not None:
            self._left[id(parameter)] = id(parameter.grad)


def unequal(count: int, parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> int:
    """The number of gradients that are some rank's alone; 0 where a program has averaged them. Collective.

    What a program does to gradients cannot be seen: a collective in place leaves no trace, and clipping does.
    But what was averaged is equal on all ranks, bit by bit.

    Args:
        count: gradients of this rank that no backward has averaged.
        parameters: all that are stepped along.
        group: all ranks that have copies of them, with a backend that moves CPU tensors.
    """
    total = tally(WHAT, group, number=count)
    assert total is not None
    if not total or vote([_checksum(p.grad) for p in parameters], group):
        return 0
    return max(1, count)


def _checksum(gradient: torch.Tensor | None) -> int | None:
    """A sum of its bits as integers, made where it is."""
    if gradient is None:
        return None
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    as_real = torch.view_as_real(values) if values.is_complex() else values
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(as_real.detach().view(kinds[as_real.dtype.itemsize]).sum(dtype=torch.int64))
