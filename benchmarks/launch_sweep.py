"""Block sizes of the Triton kernels by time, on the GPU at hand: what a GPU check writes into the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_cp.bench.kernels import kernel_passes
from lightning_cp.bench.methods import AttentionCase
from lightning_cp.bench.timers import measure
from lightning_cp.kernels.triton.blocks import (
    TABLE,
    BlockConfig,
    BlockConfigs,
    Blocks,
    Key,
    configs_for,
    fastest,
    load,
    save,
    target_of,
)
from lightning_cp.kernels.triton.launch import TritonFA2

CANDIDATES = [
    BlockConfig(own, step, warps, stages)
    for own, step in ((128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (64, 32), (32, 32))
    for warps in (4, 8)
    for stages in (1, 2, 3)
]
HEAD_DIMS = (64, 128, 256)
Measure = Callable[[AttentionCase, BlockConfigs, str], float | None]
"""Seconds of one kernel (``forward``, ``queries`` or ``keys``) with blocks; ``None`` if it does not run."""


def write_table(case: AttentionCase, file: Path = TABLE) -> Blocks:
    """Measure every head dim on this machine's GPU and write the fastest block sizes into a table.

    Args:
        case: one sequence, whose head dim is replaced; a long one, since its programs are many.
        file: the table, whose other entries stay.
    """
    target = target_of(torch.cuda.get_device_capability())
    table = load(TABLE) | swept(case, HEAD_DIMS, target, seconds_of)
    save(table, file)
    return table


def swept(case: AttentionCase, head_dims: Sequence[int], target: int, seconds: Measure) -> Blocks:
    """Return the fastest block sizes of each head dim; kernels one after the other, from the table's."""
    kind = "single" if case.dtype == torch.float32 else "half"
    found: Blocks = {}
    for head_dim in head_dims:
        of_dim = AttentionCase(**{**vars(case), "head_dim": head_dim})
        configs = configs_for(case.dtype, head_dim, target)
        for kernel in BlockConfigs._fields:
            before = getattr(configs, kernel)
            candidates = [before, *(one for one in CANDIDATES if one != before)]
            if kernel == "keys" and target == 100 and head_dim > 128:
                candidates += [one._replace(launches=2) for one in CANDIDATES]
            best = fastest(
                candidates,
                lambda one, kernel=kernel, configs=configs, case=of_dim: seconds(
                    case, configs._replace(**{kernel: one}), kernel
                ),
            )
            configs = configs._replace(**{kernel: best})
        found[Key(target, kind, head_dim)] = configs
    return found


def seconds_of(case: AttentionCase, configs: BlockConfigs, kernel: str) -> float | None:
    """Time the pass of a kernel: forward, or backward, in which the other kernel's blocks stay the same."""
    try:
        passes = kernel_passes(TritonFA2(configs), case)
        step = passes.forward if kernel == "forward" else passes.backward
        return min(measure(step, repeats=5, device_type=case.device_type).wall)
    except Exception as error:  # Triton's own type, for too much shared or tensor memory
        if "OutOfResources" in type(error).__name__ or isinstance(error, RuntimeError):
            return None
        raise
