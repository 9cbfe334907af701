"""A state that is spread over ranks, whole on the CPU of those that keep it: one tensor after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.plain import Place, map_leaves
from lightning_cp.checkpoint.tensors import assembled


def gather(tree: Any, *, keeps: bool) -> Gathered:
    """Assemble what is spread in a tree. Collective.

    Args:
        tree: plain, spread tensors at the same places on every rank.
        keeps: this rank wants them; the others take part.
    """
    found: dict[Place, DTensor] = {}
    map_leaves(tree, lambda at, x: found.update({at: x}) if isinstance(x, DTensor) else None)
    gathered = Gathered(keeps=keeps)
    for place, tensor in sorted(found.items(), key=lambda item: repr(item[0])):
        gathered.add(place, assembled(tensor))
    return gathered


class Gathered:
    """A rank's share of tensors that all ranks assemble.

    All of them go on to the last one, also where one does not fit into the memory of its machine: the
    error is kept until then.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._tensors: dict[Place, torch.Tensor] = {}
        self._keeps, self._error = keeps, None

    def add(self, place: Place, tensor: torch.Tensor) -> None:
        """Keep it, on the CPU."""
        if not self._keeps or self._error is not None:
            return
        try:
            self._tensors[place] = tensor.cpu()
        except Exception as error:
            self._tensors.clear()
            self._error = error

    def whole(self, tree: Any) -> Any:
        """The tree, its tensors whole and on the CPU.

        Raises:
            Exception: what kept one of those that were spread from being kept.
        """
        if self._error is not None:
            raise self._error
        return map_leaves(tree, lambda at, x: self._tensors[at] if at in self._tensors else _own(x))


def _own(x: torch.Tensor) -> torch.Tensor:
    """On the CPU, without the rest of a storage that it is a part of: that would be written too."""
    x = x.detach().cpu()
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x
