"""``data_parallel="ddp"``: every rank holds the whole model; gradients are averaged in backward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh, Flat


class DDPEngine:
    """PyTorch's DistributedDataParallel over the ``loss`` group (data x context parallel)."""

    name = "ddp"

    def wrap(
        self,
        module: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> DistributedDataParallel:
        """Broadcast the weights of the group's first rank, and average gradients from then on."""
        # A side stream, as PyTorch's CUDA notes ask for DDP construction.
        on_cuda = device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext():
            return DistributedDataParallel(
                module,
                device_ids=[device.index] if on_cuda else None,
                process_group=mesh.group(Flat.LOSS),
                **options,
            )


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments that DistributedDataParallel does not take, before any process starts.

    Raises:
        ConfigError: naming them.
    """
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {
        "self",
        "module",
        "device_ids",
        "process_group",
    }
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"unknown argument(s) {', '.join(unknown)}: neither a setting of this strategy nor of "
            f"DistributedDataParallel ({', '.join(sorted(known))})."
        )
