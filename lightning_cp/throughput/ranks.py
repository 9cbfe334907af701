"""Whose work counts: each sample once, however many ranks share it; and sums over ranks, exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.fabric.strategies as of_fabric
import lightning.pytorch.strategies as of_trainer
import torch
import torch.distributed as dist

from lightning_cp.comm.reduce import all_sum
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import Flat
from lightning_cp.strategies.front import ContextParallelFront
from lightning_cp.strategies.step.core import ContextParallelCore
from lightning_cp.throughput.work import Work

_LIMB = 2**40
"""FLOPs travel as two numbers, so that sums over up to 8,192 ranks are exact in float64."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run."""

    devices: int
    counts: bool
    """This rank tells of its sample; others that share it do not."""
    group: dist.ProcessGroup | None
    """Of all ranks; ``None``: there is one."""
    device: torch.device
    """That messages travel from."""

    def total(self, work: Work, seconds: float) -> tuple[Work, float]:
        """The work of all ranks, and their mean time: one message of 40 bytes; every rank comes here."""
        if self.group is None:
            return work, seconds
        high, low = divmod(work.flops, _LIMB)
        own = [work.tokens, high, low, work.unknown] if self.counts else [0] * 4
        numbers = [*own, seconds / self.devices]
        sums = all_sum(torch.tensor(numbers, dtype=torch.float64, device=self.device), self.group)
        tokens, high, low, unknown, mean = sums.tolist()
        return Work(int(tokens), int(high) * _LIMB + int(low), int(unknown)), mean


def core_of(strategy: Any) -> ContextParallelCore | None:
    """The core of a strategy of ours."""
    return strategy._core if isinstance(strategy, ContextParallelFront) else None


_PLAIN = (
    of_trainer.SingleDeviceStrategy,
    of_trainer.DDPStrategy,
    of_fabric.SingleDeviceStrategy,
    of_fabric.DDPStrategy,
)


def refuse_unknown(strategy: object) -> None:
    """Refuse a strategy under which tokens cannot be counted.

    Raises:
        ConfigError: it is not known which ranks share a sample, or parameters.
    """
    if core_of(strategy) is None and not isinstance(strategy, _PLAIN):
        raise ConfigError(
            f"throughput is not counted under {type(strategy).__name__}: it is not known which of its ranks "
            "share a sample, and parameters may be in parts. What works: strategy='ulysses_ring' (with "
            "data_parallel='fsdp', 'hsdp' or 'zero1' for parameters that are sharded), 'ddp', and one device."
        )


def ranks_of(strategy: Any) -> Ranks:
    """Whose work counts under a strategy whose processes have met."""
    core, devices = core_of(strategy), getattr(strategy, "world_size", 1)
    if core is not None:
        group = core.mesh.control_group(Flat.LOSS) if devices > 1 else None
        return Ranks(devices, core.mesh.sample_rank == 0, group, torch.device("cpu"))
    group = dist.group.WORLD if devices > 1 else None
    return Ranks(devices, True, group, strategy.root_device)
