"""Compile our Triton kernels for a GPU that need not be there; prints what each one takes.

    python -m tests.helpers.kernels.compile_triton 80 float16 64 64

for compute capability 8.0, with head dims of q and k, and of v. Each line is JSON: kernel, registers of a
thread, spilled stores and loads (of 4 bytes, by a thread), bytes of shared memory, columns of Blackwell's
tensor memory, warps, and instructions of tensor cores in PTX by kind.

| argument | effect |
|---|---|
| ``kernels=forward,backward_keys`` | these alone; also ``merge_results`` |
| ``scores=plain`` | neither cap, slopes nor largest scores, as most models |
| ``heads=one`` | programs of keys have one query head and write, as where they are few |
| ``blocks=128,64,8,2`` | these blocks instead of the table's: own, step, warps, stages, launches (else 1) |
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Output, Scores
from lightning_cp.kernels.triton.blocks import BlockConfig, BlockConfigs, configs_for
from lightning_cp.kernels.triton.launch import TritonFA2
from lightning_cp.kernels.triton.merge import launch_merge
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile

KERNELS = ("forward", "backward_queries", "backward_keys")


@dataclass(frozen=True)
class Resources:
    """What a program of a kernel takes, as ptxas reports it."""

    kernel: str
    registers: int
    stores: int
    loads: int
    shared: int
    tensor_memory: int
    warps: int
    wgmma: int
    tcgen05: int
    mma: int


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


def compile_only(capability: int, kernels: tuple[str, ...]) -> None:
    """Let launches of these kernels end after the compiler, and others before it."""
    driver.set_active(AbsentDriver(capability))  # type: ignore[arg-type]
    knobs.compilation.always_compile = True  # from the cache no report of ptxas would come
    knobs.nvidia.dump_ptxas_log = True
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        if self.fn.__name__ not in kernels:
            return None
        with contextlib.redirect_stdout(io.StringIO()) as report:
            kernel = run(self, *args, grid=grid, warmup=True, **constants)
        assert kernel is not None
        taken = resources(self.fn.__name__, kernel, report.getvalue())
        print(json.dumps(asdict(taken)), flush=True)
        return kernel

    JITFunction.run = compiled  # type: ignore[method-assign]


def resources(name: str, kernel: Any, report: str) -> Resources:
    """Read them from a compiled kernel and the report of ptxas."""
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spills is not None
    assert registers is not None
    products = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma": r"mma\.sync"}
    return Resources(
        kernel=name,
        registers=int(registers[1]),
        stores=int(spills[1]) // 4,
        loads=int(spills[2]) // 4,
        shared=kernel.metadata.shared,
        tensor_memory=kernel.metadata.tmem_size or 0,
        warps=kernel.metadata.num_warps,
        **{kind: len(re.findall(text, kernel.asm["ptx"])) for kind, text in products.items()},
    )


def main(
    capability: int,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    options: Mapping[str, str],
) -> None:
    wanted = tuple(options.get("kernels", ",".join(KERNELS)).split(","))
    compile_only(capability, wanted)
    shapes = ((4, head_dim), (2, head_dim), (2, value_dim), (4, value_dim))
    q, k, v, out = (torch.zeros(2, 64, *shape, dtype=dtype) for shape in shapes)
    lse = torch.zeros(2, 4, 64)
    scores = Scores(0.1, Mask(), 30.0, torch.ones(4), max_logits=True)
    if options.get("scores") == "plain":
        scores = Scores(0.1, Mask())
    blocks = configs_for(dtype, max(head_dim, value_dim), capability)
    if "blocks" in options:
        blocks = BlockConfigs(*[BlockConfig(*map(int, options["blocks"].split(",")))] * 3)
    tiles = [Tile(ALL_ROWS, 0, 64, 0, 64, 0, "causal")]
    inputs = QKV(q, k, v)
    alone = options.get("heads") == "one"
    kernel = TritonFA2(blocks, split_below=512 if alone else 0)
    state = Accumulator(q, torch.float32, value_dim, single=alone)
    sums = GradientSums.like(inputs, torch.float32)
    if not alone:
        sums = GradientSums.of(*(torch.zeros_like(x, dtype=torch.float32) for x in inputs))
    kernel.forward(inputs, tiles, scores, state)
    kernel.backward(Output(out, out, lse), inputs, tiles, scores, sums)
    launch_merge(out.float(), lse, out, lse)


if __name__ == "__main__":
    chosen = dict(argument.split("=", 1) for argument in sys.argv[5:])
    wide, of_values = map(int, sys.argv[3:5])
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]), wide, of_values, chosen)
    print("compiled with triton", triton.__version__, file=sys.stderr)
