"""Values that are set whole on every rank, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_cp.checkpoint.pretrained.blank import Blank, blank_like
from lightning_cp.checkpoint.pretrained.fresh import has_nan
from lightning_cp.checkpoint.pretrained.memory import Part, room_for_whole
from lightning_cp.comm.local import local_part
from lightning_cp.errors import LightningCPError


@dataclass
class Whole:
    """Some of a module's own values, whole within the block, so that they are set as in one process.

    They draw as many random numbers, on every rank. The module's other parameters have no values in the
    block and take no memory, so nothing is made whole that is not set; its other buffers have copies of
    theirs. All of them are as they were afterwards, whatever was written.
    """

    module: nn.Module
    names: Collection[str]
    """Of what is set."""
    path: str = ""
    """The module's, for errors."""
    again: Collection[str] = ()
    """Of what is set too, and had values before that it keeps: tied parameters."""
    unread: Collection[str] = ()
    """Of buffers whose values come later."""
    _held: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    @contextmanager
    def block(self, device: torch.device) -> Iterator[None]:
        """Where values are whole; afterwards the module has what it had.

        Args:
            device: where all ranks of the parameters' meshes compute.
        """
        try:
            self._enter(device)
            yield
        finally:
            _put(self.module, self._held)
            self._held = {}

    def _enter(self, device: torch.device) -> None:
        own = {**self.module._parameters, **self.module._buffers}
        held = {
            name: x
            for name, x in own.items()
            if x is not None and not (name in self.names and _is_whole_on(device, x))
        }
        made: dict[int, torch.Tensor] = {
            id(x): x for name, x in own.items() if x is not None and name not in held
        }
        for name, x in sorted(held.items(), key=lambda pair: pair[0] not in self.names):
            if id(x) not in made:  # one that has two names here is one in the block too
                made[id(x)] = self._stand_in(name, x, device)
        _put(self.module, {name: made[id(x)] for name, x in held.items()})
        self._held = held

    def _stand_in(self, name: str, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not self._has_memory(name, x):
            return blank_like(x, device, name)
        with room_for_whole(self._named(name), x, device):
            if name not in self.names and name not in self.again:
                return x.detach().to(device, copy=True)
            made = torch.empty(x.shape, dtype=x.dtype, device=device)
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made

    def _has_memory(self, name: str, x: torch.Tensor) -> bool:
        """True if it has some of its own in the block, of what is not whole where it is."""
        if name in self.names or name in self.again:
            return True
        return not isinstance(x, nn.Parameter | DTensor) and name not in self.unread

    def _named(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def values(self) -> dict[str, torch.Tensor]:
        """The tensors that are set; to be called in the block."""
        return {name: getattr(self.module, name) for name in self.names}

    def keep(self, values: Mapping[str, torch.Tensor]) -> None:
        """Have this rank's part of them; to be called after the block."""
        for name, whole in values.items():
            part = getattr(self.module, name)
            if part is not whole:
                with room_for_whole(self._named(name), whole, whole.device):
                    _keep_part(part, whole)

    def parts(self, apart: bool, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> list[Part]:
        """The bytes that the block takes beside the model, before it has memory itself.

        Args:
            apart: the block is on another device than the model.
            dtype_of: what each is going to have.
        """
        found: dict[int, Part] = {}
        for name, x in {**self.module._parameters, **self.module._buffers}.items():
            if x is None or id(x) in found or not self._has_memory(name, x):
                continue
            taken = 0
            if name not in self.names or apart or isinstance(x, DTensor):
                taken = x.numel()
            if name in self.names and isinstance(x, DTensor):
                taken += local_part(x).numel()  # while this rank's part is copied
            if name in self.names and not has_nan(x):
                taken += x.numel()  # while it is set twice
            found[id(x)] = Part(self._named(name), x.shape, taken * dtype_of(x).itemsize)
        return list(found.values())

    def numel(self) -> int:
        """The number of values with memory in the block."""
        own = {**self.module._parameters, **self.module._buffers}
        having = {id(x): x for k, x in own.items() if x is not None and self._has_memory(k, x)}
        return sum(x.numel() for x in having.values())

    @contextmanager
    def must_not_read(self, error: type[LightningCPError]) -> Iterator[None]:
        """Say what would help where something in the block asks for values that are not there."""
        try:
            yield
        except (RuntimeError, TypeError) as raised:  # of PyTorch, too: not all comes to a Blank
            without = [name for name in self._held if isinstance(getattr(self.module, name), Blank)]
            if isinstance(raised, LightningCPError) or not without:
                raise
            kind = type(self.module).__name__
            raise error(
                f"{self.path or 'the model'} ({kind}) failed when its {', '.join(self.names)} got values: "
                f"{raised}. There {', '.join(without)} can be written, but not read, so that nothing is made "
                "whole that is not set. Give the module a method reset_buffers() that sets what no file "
                "holds without reading what they hold, or pass initialize=."
            ) from raised


def _is_whole_on(device: torch.device, x: torch.Tensor) -> bool:
    return x.device == device and not isinstance(x, DTensor)


def _put(module: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    """Have a module's own states replaced, past what its ``__setattr__`` would do."""
    for name, x in states.items():
        held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
        held[name] = x


def _keep_part(part: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy what this rank holds of a tensor that every rank has whole."""
    if isinstance(part, DTensor):
        own = distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
        whole = own.to_local()
    local_part(part).copy_(whole)
