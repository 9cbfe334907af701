"""What a model needs that no file holds: who sets it, and the same values on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.checkpoint.pretrained.fresh import (
    Initialize,
    Names,
    left_unset,
    same_as_first,
    ways_to_set,
)
from lightning_cp.checkpoint.pretrained.incomplete import without_values
from lightning_cp.checkpoint.pretrained.memory import Part
from lightning_cp.checkpoint.pretrained.names import plain
from lightning_cp.checkpoint.pretrained.plan import LoadPlan
from lightning_cp.checkpoint.pretrained.whole import Whole
from lightning_cp.comm.objects import World
from lightning_cp.comm.outcome import share_outcome
from lightning_cp.errors import CheckpointError

LOADING = "loading pretrained weights"


class Rest:
    """What is on the meta device and in no file.

    Args:
        model: sharded already, if it is to be.
        plan: of what the files hold.
        initialize: the user's own way; by default that of modules or of their model.

    Raises:
        CheckpointError: a module that nothing sets.
    """

    def __init__(self, model: nn.Module, plan: LoadPlan, initialize: Initialize | None) -> None:
        in_files = {id(x) for k, x in plan.tensors.by_name.items() if k not in plan.missing}
        unset = _not_in_files(model, in_files)
        self._owners = [(path, x) for path, x in model.named_modules() if x in unset]
        self._unset = unset
        self._unread = {
            module: [name for name, x in module._buffers.items() if id(x) in in_files]
            for module in unset
        }
        self._ways = {
            x: [initialize] if initialize is not None else ways_to_set(model, x) for x in unset
        }
        for path, module in self._owners:
            if not self._ways[module]:
                raise CheckpointError(
                    f"{plain(path) or 'the model'} ({type(module).__name__}) has buffers or parameters on "
                    f"the meta device that the checkpoint does not hold ({', '.join(unset[module])}), and "
                    "nothing says what their values are. Give the module a method reset_buffers() or "
                    "reset_parameters() that sets them, pass initialize=, or build it on a real device. "
                    "Nothing was loaded."
                )

    def require_same(self) -> None:
        """Refuse ranks that lack different things, since they are set on all of them together. Collective.

        Raises:
            CheckpointError: on every rank, naming one that only some lack.
        """
        own = {f"{plain(path)}.{name}" for path, x in self._owners for name in self._unset[x]}
        for rank, names in enumerate(every := World().gather(own)):
            if names != every[0]:
                raise CheckpointError(
                    f"{min(names ^ every[0])} is on the meta device on one of the ranks 0 and {rank} only, "
                    "and no file holds it. Build the model in the same way on every rank. Nothing was loaded."
                )

    def _wholes(self) -> Iterator[Whole]:
        for path, module in self._owners:
            yield Whole(module, self._unset[module], plain(path), unread=self._unread[module])

    def parts(self, apart: bool, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> list[Part]:
        """What setting it takes beside the model: of the module that takes most.

        Args:
            apart: values are set on another device than the model's.
            dtype_of: what each tensor is going to have.
        """
        every = [whole.parts(apart, dtype_of) for whole in self._wholes()]
        return max(every, key=lambda parts: sum(part.nbytes for part in parts), default=[])

    def set(self, device: torch.device, now: Callable[[str], None] = lambda doing: None) -> None:
        """Values for all of it, those of rank 0. Collective.

        Args:
            device: where they are drawn; ranks exchange tensors of this kind.
            now: told what is done.

        Raises:
            CheckpointError: a module that left something without a value.
            RankFailure: another rank has raised.
        """
        group: Any = dist.group.WORLD if dist.is_initialized() else None
        for whole in self._wholes():
            now(f"setting {whole.path or type(whole.module).__name__}")
            with torch.no_grad():
                self._set(whole, device, group)

    def _set(self, whole: Whole, device: torch.device, group: Any) -> None:
        module, names = whole.module, whole.names
        try:
            with together(device):
                whole.enter(device)
                with whole.must_not_read(CheckpointError):
                    left = left_unset(module, names, self._ways[module], whole.path)
                _require_set(module, left)
            if group is not None:
                same_as_first(module, names, device, group)
            with together(device):
                whole.keep()
        finally:
            whole.leave()


@contextmanager
def together(device: torch.device) -> Iterator[None]:
    """What raises on one rank in the block raises on all of them after it.

    Args:
        device: whose tensors ranks exchange.
    """
    error = None
    try:
        yield
    except Exception as raised:  # of the user's function, say: the others are not to wait
        error = raised
    share_outcome(error, device.type, what=LOADING)


def _not_in_files(model: nn.Module, in_files: Collection[int]) -> Names:
    """What has none now and, by its id, in no file; tied ones once."""
    seen = set(in_files)
    found: Names = {}
    for module, names in without_values(model).items():
        for name in names:
            if id(getattr(module, name)) not in seen:
                seen.add(id(getattr(module, name)))
                found.setdefault(module, []).append(name)
    return found


def _require_set(module: nn.Module, left: list[str]) -> None:
    if left:
        raise CheckpointError(
            f"{type(module).__name__} left its {left[0]} without a value when it was made again. Have "
            "its reset_buffers() or reset_parameters() set it, or pass initialize=."
        )
