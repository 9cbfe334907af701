"""Values that are set whole on every rank, and what that takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_cp.checkpoint.pretrained.blank import Blank, blank_like
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

    def enter(self, device: torch.device) -> None:
        """Begin the block.

        Args:
            device: where all ranks of the parameters' meshes compute.
        """
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
        if name in self.names or name in self.again:
            made = torch.empty(x.shape, dtype=x.dtype, device=device)
            return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made
        if isinstance(x, nn.Parameter | DTensor) or name in self.unread:
            return blank_like(x, device, name)
        return x.detach().to(device, copy=True)

    def keep(self) -> None:
        """Have this rank's part of what was set."""
        for name in self._held.keys() & set(self.names):
            _keep_part(self._held[name], getattr(self.module, name))

    def leave(self) -> None:
        """End the block."""
        _put(self.module, self._held)
        self._held = {}

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
