"""How many tokens a program takes at a time, by dtype and head dim.

Chosen by what the compiler says for sm_80: shared memory within the 99 KiB that the smaller GPUs
since Ampere have, few registers spilled. Not tuned by time. float32 has no tensor cores here, and
large blocks of it spill by kilobytes and compile for minutes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """One kernel's blocks; powers of two, at least 16.

    Attributes:
        own: tokens that a program owns.
        step: tokens of the other side that it takes in at a time.
        warps: groups of 32 threads per program.
        stages: how many steps are in flight.
    """

    own: int
    step: int
    warps: int = 4
    stages: int = 2


class Launches(NamedTuple):
    """Of the three kernels."""

    forward: Launch
    queries: Launch
    keys: Launch


_HALF = {
    32: Launches(Launch(128, 64, 4, 3), Launch(128, 64, 4, 3), Launch(128, 64, 4, 2)),
    64: Launches(Launch(128, 64, 4, 3), Launch(128, 64, 8, 2), Launch(128, 64, 8, 2)),
    128: Launches(Launch(128, 64, 8, 2), Launch(64, 64, 4, 2), Launch(64, 64, 8, 2)),
    256: Launches(Launch(64, 32, 4, 2), Launch(64, 32, 8, 1), Launch(32, 32, 8, 1)),
}
_SINGLE = {
    32: Launches(Launch(64, 32, 4, 1), Launch(64, 32, 4, 1), Launch(32, 32, 4, 1)),
    64: Launches(Launch(32, 32, 4, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1)),
    128: Launches(Launch(32, 32, 8, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1)),
    256: Launches(Launch(16, 16, 8, 1), Launch(16, 16, 8, 1), Launch(16, 16, 8, 1)),
}


def launches(dtype: torch.dtype, head_dim: int) -> Launches:
    """The blocks of a dtype and the wider head dim of K and V, padded to a power of two."""
    sizes = _SINGLE if dtype == torch.float32 else _HALF
    return next(sizes[size] for size in sorted(sizes) if head_dim <= size)
