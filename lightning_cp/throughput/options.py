"""The settings of a throughput count, the ranks of the run with their exact sums, and the peak of MFU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import lightning.fabric.strategies as of_fabric
import lightning.pytorch.strategies as of_trainer
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch import nn

from lightning_cp.comm.reduce import all_sum
from lightning_cp.engines.checks import mixed_precision_policy
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.throughput.work import Work

_LIMB = 2**40
"""FLOPs travel as two numbers, so that sums over up to 8,192 ranks are exact in float64."""


@dataclass(frozen=True)
class RunRanks:
    """The ranks of a run."""

    devices: int
    counts: bool
    """True if this rank counts its sample; the other ranks that share it do not."""
    group: dist.ProcessGroup | None
    """The group of all ranks; ``None`` for one rank."""
    device: torch.device
    """The device of messages."""

    def total(self, work: Work, seconds: float) -> tuple[Work, float]:
        """Return all ranks' work and mean time, by one message of 40 bytes; all ranks must call this."""
        if self.group is None:
            return work, seconds
        high, low = divmod(work.flops, _LIMB)
        own = [work.tokens, high, low, work.unknown] if self.counts else [0] * 4
        numbers = [*own, seconds / self.devices]
        sums = all_sum(torch.tensor(numbers, dtype=torch.float64, device=self.device), self.group)
        tokens, high, low, unknown, mean = sums.tolist()
        return Work(int(tokens), int(high) * _LIMB + int(low), int(unknown)), mean


def runtime_of(strategy: Any) -> ContextParallelRuntime | None:
    """Return the runtime of this package's strategy, ``None`` for another strategy."""
    runtime = getattr(strategy, "runtime", None)
    return runtime if isinstance(runtime, ContextParallelRuntime) else None


_PLAIN = (
    of_trainer.SingleDeviceStrategy,
    of_trainer.DDPStrategy,
    of_fabric.SingleDeviceStrategy,
    of_fabric.DDPStrategy,
)


def check_countable(strategy: object) -> None:
    """Check that tokens can be counted under a strategy.

    Raises:
        ConfigError: it is unknown which ranks share a sample, or parameters.
    """
    if runtime_of(strategy) is None and not isinstance(strategy, _PLAIN):
        raise ConfigError(
            f"throughput is not counted under {type(strategy).__name__}: it is unknown which of its ranks "
            "share a sample, and parameters may be in parts. What works: strategy='ulysses_ring' (with "
            "data_parallel='fsdp', 'hsdp' or 'zero1' for parameters that are sharded), 'ddp', and one device."
        )


def ranks_of(strategy: Any) -> RunRanks:
    """Return the ranks of a strategy whose process group is initialised."""
    runtime, devices = runtime_of(strategy), getattr(strategy, "world_size", 1)
    if runtime is not None:
        group = runtime.mesh.control_group(Flat.LOSS) if devices > 1 else None
        return RunRanks(devices, runtime.mesh.sample_rank == 0, group, torch.device("cpu"))
    group = dist.group.WORLD if devices > 1 else None
    return RunRanks(devices, True, group, strategy.root_device)


@dataclass(frozen=True)
class ThroughputOptions:
    """The user's options; see ``ThroughputCallback``."""

    every_n_steps: int = 50
    warmup_steps: int = 1
    peak_flops: float | None = None
    active_parameters: int | None = None
    sequence_dims: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        _check_count("every_n_steps", self.every_n_steps, 1, "50 logs every 50 optimizer steps")
        _check_count("warmup_steps", self.warmup_steps, 0, "1 leaves out the first, 0 none")
        if self.active_parameters is not None:
            what = "None counts the model's own; a dense model of 7e9 would say 7_000_000_000"
            _check_count("active_parameters", self.active_parameters, 1, what)
        peak: Any = self.peak_flops
        is_number = isinstance(peak, Real) and not isinstance(peak, bool)
        if peak is not None and not (is_number and 0 < float(peak) < math.inf):
            raise ConfigError(
                f"peak_flops must be the FLOP/s of one device, a positive number, got {peak!r}. 989e12 is an "
                "H100 SXM in bfloat16; None looks the device up."
            )
        dims: Any = self.sequence_dims
        if dims is not None and not isinstance(dims, Mapping):
            raise ConfigError(
                f"sequence_dims must map names of a batch's tensors to sequence dimensions, got {dims!r}. "
                "{'tokens': 1, 'weights': None} would do; None where the strategy knows them."
            )

    def with_dims(self, declared: Mapping[str, int | None]) -> ThroughputOptions:
        """Return the options with a module's declared dims; the user's take precedence."""
        return replace(self, sequence_dims={**declared, **(self.sequence_dims or {})})


def _check_count(name: str, value: object, least: int, works: str) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}, got {value!r}. {works}."
        )


@dataclass(frozen=True)
class Peak:
    """The FLOP/s of one device."""

    flops: float | None
    where: str
    """The source of the peak, or the device whose peak is unknown."""


def peak_of(
    options: ThroughputOptions,
    device: torch.device,
    precision: object,
    strategy: Any,
    model: nn.Module,
) -> Peak:
    """Return the FLOP/s that MFU is a share of: the user's value, or Lightning's table of devices.

    Args:
        options: the user's options.
        device: this rank's device.
        precision: the plugin of a Trainer or a Fabric.
        strategy: has the dtype of layers that an engine casts.
        model: has the dtype of its own weights.
    """
    if options.peak_flops is not None:
        return Peak(float(options.peak_flops), "peak_flops=")
    if device.type != "cuda":
        return Peak(None, device.type)
    dtype = dtype_of(precision, strategy, model)
    name = torch.cuda.get_device_name(device)
    with warnings.catch_warnings():  # the meter reports it, once
        warnings.simplefilter("ignore")
        try:
            found = get_available_flops(device, dtype)
        except Exception:  # an unknown form of device name
            found = None
    return Peak(found, f"{name} in {str(dtype).removeprefix('torch.')}")


def dtype_of(precision: Any, strategy: Any, model: nn.Module) -> torch.dtype:
    """Return the dtype of matrix products."""
    runtime = runtime_of(strategy)
    cast = (
        None
        if runtime is None
        else mixed_precision_policy(runtime.settings.mixed_precision).param_dtype
    )
    if cast is not None:
        return cast
    asked = _plugin_to_compute_dtype(precision)
    if asked is not torch.float32:
        return asked
    matrix = next((p for p in model.parameters() if p.dim() > 1 and p.is_floating_point()), None)
    return asked if matrix is None else matrix.dtype
