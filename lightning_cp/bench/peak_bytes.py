"""Counting the bytes of tensors that live at once, exactly, on tensors with or without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages that are made while it is on, and how many of them lived at once.

    Tensors on the meta device have none; fake tensors count as what they stand for.
    What an operator allocates and frees inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for x in _tensors(made):
            storage = x.untyped_storage()
            if id(storage) not in given:
                ref = StorageWeakRef(storage)
                self._live[ref.cdata] = (ref, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return made

    @property
    def live(self) -> int:
        """Bytes that are there now."""
        self._live = {key: pair for key, pair in self._live.items() if not pair[0].expired()}
        return sum(size for _, size in self._live.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    found = (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
    return [x for x in found if x.device.type != "meta"]
