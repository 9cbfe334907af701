"""Block sizes of the Triton kernels, by GPU, dtype and head dim: a table in ``blocks.json``.

Without a GPU, entries are chosen from the compiler's reports: no registers spilled, products by the tensor
cores of the GPU's kind (wgmma on Hopper, tcgen05 on Blackwell), shared memory that fits. A GPU chooses by
time: ``make gpu-check`` writes them.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).with_name("blocks.json")


class BlockConfig(NamedTuple):
    """Block sizes of one kernel; powers of two, at least 16.

    Attributes:
        own: tokens that a program owns.
        step: tokens of the other side per iteration.
        warps: groups of 32 threads per program.
        stages: iterations in flight.
        launches: of the kernel of dk and dv; two compute them apart. Blackwell's tensor memory of 512 columns
            has no room for both and for scores where heads have more than 128 entries.
    """

    own: int
    step: int
    warps: int = 4
    stages: int = 2
    launches: int = 1


class BlockConfigs(NamedTuple):
    """Block sizes of the three kernels."""

    forward: BlockConfig
    queries: BlockConfig
    keys: BlockConfig


class Key(NamedTuple):
    """Kind of a launch.

    Attributes:
        target: compute capability for which it was chosen, as 80, 90 or 100.
        dtype: ``half`` for float16 and bfloat16, or ``single``.
        head_dim: the widest that it is for.
    """

    target: int
    dtype: str
    head_dim: int


Blocks = dict[Key, BlockConfigs]


def block_configs(dtype: torch.dtype, head_dim: int, device: torch.device) -> BlockConfigs:
    """Return the block sizes for a dtype and the wider head dim of K and V on a device."""
    return configs_for(dtype, head_dim, _target_of(device))


def configs_for(dtype: torch.dtype, head_dim: int, target: int) -> BlockConfigs:
    """Return the block sizes for a target of :func:`target_of`."""
    kind = "single" if dtype == torch.float32 else "half"
    table = load(TABLE)
    fitting = [key for key in table if key[:2] == (target, kind) and head_dim <= key.head_dim]
    return table[min(fitting)]


def target_of(capability: tuple[int, int]) -> int:
    """Return the target of a GPU: its own only on Hopper and on Blackwell's servers, else Ampere's.

    GPUs of compute capability 8.6, 8.9 and 12 have Ampere's tensor cores and less shared memory.
    """
    return {9: 90, 10: 100}.get(capability[0], 80)


@lru_cache(maxsize=64)
def _target_of(device: torch.device) -> int:
    """Return the target of a device; in the interpreter, which has no registers, Ampere's."""
    if device.type != "cuda":
        return target_of((8, 0))
    return target_of(torch.cuda.get_device_capability(device))


@lru_cache(maxsize=8)
def load(file: Path) -> Blocks:
    """Read a table."""
    return {
        Key(int(target), dtype, int(head_dim)): BlockConfigs(
            **{kernel: BlockConfig(*sizes) for kernel, sizes in by_kernel.items()}
        )
        for target, by_dtype in json.loads(file.read_text()).items()
        for dtype, by_dim in by_dtype.items()
        for head_dim, by_kernel in by_dim.items()
    }
