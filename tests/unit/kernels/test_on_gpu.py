"""The CUDA kernels on a CUDA device: the same cells as emulated, in half precision, and packs at full size.

Skipped without a device; a kernel whose package or device is missing is skipped with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from lightning_cp.kernels.aten import AtenCudaCudnn
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Kernel, Output, Request, Scores
from lightning_cp.kernels.select import kernels
from lightning_cp.kernels.varlen import PackRule, VarlenKernel
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile
from tests.helpers.kernels.cells import (
    DOCUMENTS,
    HEADS,
    LAYOUTS,
    MASKS,
    SEQ_LEN,
    WINDOWS,
    intervals,
)
from tests.helpers.kernels.dense import Problem, check, run, sharded

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

NAMES = ("aten_cuda_flash", "flash_attn_2", "flash_attn_3")
RULES = {"rule": PackRule(), "always": PackRule(fewest=1), "never": PackRule(fewest=1 << 30)}
SHORT = tuple([17, 3, 40, 1, 64] * 16)
LONG = Problem(
    Mask(), (8, 2), (intervals(*SHORT), intervals(*SHORT[::-1])), torch.bfloat16, sum(SHORT), 128
)


class OnGpu:
    """A kernel given its tensors on the device; what it returns is brought back."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self.capabilities = kernel.capabilities
        self._kernel = kernel

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        there = QKV(*(x.cuda() for x in inputs))
        partial = Accumulator(there.q, torch.float32, there.v.shape[3])
        self._kernel.forward(there, tiles, scores, partial)
        state.add(ALL_ROWS, 0, *(x.cpu() for x in partial.result(torch.float32)))

    def backward(
        self,
        merged: Output,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        known, there = Output(*(x.cuda() for x in merged)), QKV(*(x.cuda() for x in inputs))
        sums = GradientSums.of(*(x.cuda() for x in gradients.totals))
        self._kernel.backward(known, there, tiles, scores, sums)
        for here, total in zip(gradients.totals, sums.totals, strict=True):
            here.copy_(total)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    wanted = Request("cuda", torch.bfloat16, 64, frozenset({"full", "causal", "band"}))
    reason = kernels()[request.param].capabilities.refusal(wanted)
    if reason is not None:
        pytest.skip(f"{request.param} {reason}")
    return request.param


def kernel_of(name: str, rule: str) -> Kernel:
    kernel = type(kernels()[name])
    assert issubclass(kernel, VarlenKernel)
    return OnGpu(kernel(RULES[rule]))  # type: ignore[abstract,return-value]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mask", MASKS | WINDOWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cells(dtype: torch.dtype, mask: str, rule: str, name: str) -> None:
    for documents, layout in product(DOCUMENTS.values(), LAYOUTS.values()):
        problem = Problem((MASKS | WINDOWS)[mask], HEADS["gqa"], documents, dtype, SEQ_LEN, 64)
        check(sharded(problem, kernel_of(name, rule), layout), problem)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (128, 64), (64, 96)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cudnn_cells(
    dtype: torch.dtype, mask: str, heads: str, head_dim: int, value_dim: int
) -> None:
    """Documents of one token among them, which are a single key."""
    cudnn = AtenCudaCudnn()
    wanted = Request("cuda", dtype, head_dim, frozenset(MASKS), value_dim=value_dim)
    reason = cudnn.capabilities.refusal(wanted)
    if reason is not None:
        pytest.skip(f"aten_cuda_cudnn {reason}")
    for documents, layout in product(DOCUMENTS.values(), LAYOUTS.values()):
        problem = Problem(
            *(MASKS[mask], HEADS[heads], documents, dtype, SEQ_LEN, head_dim), value_dim=value_dim
        )
        check(sharded(problem, OnGpu(cudnn), layout), problem)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (64, 128)],
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mask", [Mask(), Mask(window=(20, -1))], ids=str)
def test_many_short_documents(
    mask: Mask, rule: str, head_dim: int, value_dim: int, name: str
) -> None:
    problem = replace(LONG, mask=mask, head_dim=head_dim, value_dim=value_dim)
    for layout in ("1", "3_zigzag"):
        layout_of = replace(LAYOUTS[layout], seq_len=problem.seq_len)
        check(sharded(problem, kernel_of(name, rule), layout_of), problem)


def test_packed_gradients_are_the_same_bits_each_time(name: str) -> None:
    tensors = LONG.tensors()
    tiles = [Tile(row, at, 8, at, 8, 0, "causal") for row in (0, 1) for at in range(0, 1600, 9)]
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(kernel_of(name, "always"), tensors, tiles, Mask()) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
