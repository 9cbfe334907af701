"""Gradients that DistributedDataParallel has left on their ranks, for a later backward to average."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_State = tuple[int, int]
"""Which tensor a gradient is, and in which version of it."""


class KeptBack:
    """Of one wrapped model: what backward has left without averaging, and nobody has touched since."""

    def __init__(self) -> None:
        self._left: dict[int, _State] = {}  # by id of the parameter
        self._averages = self._follows = False

    def begins(self, module: nn.Module, *, averages: bool) -> None:
        """A backward does, which averages gradients if it comes to this model, or leaves them."""
        self._averages = averages
        if not averages and not self._follows:
            self._follows = True  # most programs never get here, and have no hooks
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note)

    def among(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of them whose gradient is this rank's alone."""
        if not self._left:
            return []
        return [
            p
            for p in parameters
            if p.grad is not None and self._left.get(id(p)) == _state_of(p.grad)
        ]

    def _note(self, parameter: torch.Tensor) -> None:
        if self._averages:
            self._left.clear()  # all of the model's are averaged together
        elif parameter.grad is not None:
            self._left[id(parameter)] = _state_of(parameter.grad)


def _state_of(gradient: torch.Tensor) -> _State:
    # A view has the version of what it is a view of, which others share.
    return id(gradient), 0 if gradient._is_view() else gradient._version
