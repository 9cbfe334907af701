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
        self._live: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.looks = True
        """Otherwise what is made is noted, and its sum is not: which takes most of the time."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for x in _tensors(made):
            storage = x.untyped_storage()
            if id(storage) not in given:
                ref = StorageWeakRef(storage)
                self._live[ref.cdata] = ref
        if self.looks:
            self.peak = max(self.peak, self.live)
        return made

    @property
    def live(self) -> int:
        """Bytes that are there now: engines give a storage's memory back and take it again."""
        found = {key: torch.UntypedStorage._new_with_weak_ptr(key) for key in self._live}
        self._live = {key: ref for key, ref in self._live.items() if found[key] is not None}
        return sum(storage.nbytes() for storage in found.values() if storage is not None)

    def forget_peak(self) -> None:
        """From here on, what is there now counts."""
        self.peak = self.live


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Of a DTensor, this rank's part: what it is itself has no memory."""
    found = (
        getattr(x, "_local_tensor", x) for x in tree_leaves(tree) if isinstance(x, torch.Tensor)
    )
    return [x for x in found if x.device.type != "meta"]
