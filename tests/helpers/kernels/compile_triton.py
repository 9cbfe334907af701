"""Compile our Triton kernels for a GPU that need not be there; prints what each one takes.

    python -m tests.helpers.kernels.compile_triton 80 float16 64 64

for compute capability 8.0, with head dims of q and k, and of v. Each line: kernel, bytes of shared
memory, warps.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Merged, Scores
from lightning_cp.kernels.triton.launch import TritonFA2
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile


class AbsentDriver:
    """What the compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> None:
    """Let launches end after the compiler."""
    driver.set_active(AbsentDriver(capability))  # type: ignore[arg-type]
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **constants)
        assert kernel is not None
        print(self.fn.__name__, kernel.metadata.shared, kernel.metadata.num_warps, flush=True)
        return kernel

    JITFunction.run = compiled  # type: ignore[method-assign]


def main(capability: int, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    compile_only(capability)
    shapes = ((4, head_dim), (2, head_dim), (2, value_dim), (4, value_dim))
    q, k, v, out = (torch.zeros(2, 64, *shape, dtype=dtype) for shape in shapes)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    scores = Scores(0.1, Mask(), 30.0, torch.ones(4), max_logits=True)
    tiles = [Tile(ALL_ROWS, 0, 64, 0, 64, 0, "causal")]
    kernel, lse = TritonFA2(), torch.zeros(2, 4, 64)
    inputs, gradients = QKV(q, k, v), GradientSums.of(dq, dk, dv)
    kernel.forward(inputs, tiles, scores, Accumulator(q, torch.float32, value_dim))
    kernel.backward(Merged(out, out, lse), inputs, tiles, scores, gradients)


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]), *map(int, sys.argv[3:5]))
    print("compiled with triton", triton.__version__)
