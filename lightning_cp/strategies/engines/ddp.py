"""``data_parallel="ddp"``: every rank holds the whole model; gradients are averaged in backward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import Any
from weakref import ref

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.strategies.choices import refuse_unknown
from lightning_cp.strategies.settings import Settings


class DDPEngine:
    """PyTorch's DistributedDataParallel over the ``loss`` group (data x context parallel)."""

    name = "ddp"

    def __init__(self) -> None:
        self._averaged: dict[int, ref[nn.Parameter]] = {}  # by id: tensors do not hash by equality

    def wrap(
        self,
        module: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> DistributedDataParallel:
        """Broadcast the weights of the group's first rank, and average gradients from then on."""
        for parameter in module.parameters():
            self._averaged.pop(id(parameter), None)
            if parameter.requires_grad:
                self._averaged[id(parameter)] = ref(parameter)
        # A side stream, as PyTorch's CUDA notes ask for DDP construction.
        on_cuda = device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext():
            return DistributedDataParallel(
                module,
                device_ids=[device.index] if on_cuda else None,
                process_group=mesh.group(Flat.LOSS),
                **options,
            )

    def is_current(self, module: nn.Module) -> bool:
        """Whether the same parameters are trained as when the module was wrapped.

        DistributedDataParallel averages those that it saw trained when it was made and no others, and waits
        for each of them.
        """
        return all(p.requires_grad == self._averages(p) for p in module.parameters())

    def left_out(self, module: nn.Module) -> list[str]:
        """Names of parameters that are trained now, but were frozen when their module was wrapped."""
        return [
            name
            for name, p in module.named_parameters()
            if p.requires_grad and not self._averages(p)
        ]

    def _averages(self, parameter: nn.Parameter) -> bool:
        known = self._averaged.get(id(parameter))
        return known is not None and known() is parameter


def without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say something: LightningCLI passes every argument that it finds, at its default."""
    parameters = inspect.signature(DistributedDataParallel).parameters
    return {
        name: value
        for name, value in options.items()
        if name not in parameters or value is not parameters[name].default
    }


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what is left of the strategy's arguments unless DistributedDataParallel takes it.

    Raises:
        ConfigError: naming what it does not take, before any process starts.
    """
    known = _arguments(DistributedDataParallel) - {"module", "device_ids", "process_group"}
    refuse_unknown(
        sorted(set(options) - known),
        [item.name for item in fields(Settings)],
        sorted(known | _arguments(DDPStrategy)),
    )


def _arguments(made: type) -> set[str]:
    return set(inspect.signature(made).parameters) - {"kwargs"}
