"""Where Triton's kernels are tested: on a CUDA device, or in Triton's interpreter on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Kernel, Output, Scores
from lightning_cp.kernels.triton.launch import (
    BlockConfig,
    BlockConfigs,
    TritonFA2,
    is_installed,
    is_interpreted,
)
from lightning_cp.layout.tiles import ALL_ROWS

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            not (is_installed() and is_interpreted()),
            reason="needs Triton and TRITON_INTERPRET=1, which tests/conftest.py sets without CUDA",
        ),
    ),
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    ),
]


def with_dtypes(cpu: Sequence[torch.dtype], cuda: Sequence[torch.dtype]) -> list[Any]:
    """Each device with its dtypes, for ``parametrize(("device", "dtype"), ..)``."""
    return [
        pytest.param(
            *device.values,
            dtype,
            marks=device.marks,
            id=f"{device.values[0]}-{str(dtype).removeprefix('torch.')}",
        )
        for device, dtypes in zip(DEVICES, (cpu, cuda), strict=True)
        for dtype in dtypes
    ]


SMALL = BlockConfigs(*[BlockConfig(32, 16)] * 3)


def triton_on(device: str) -> TritonFA2:
    """The kernel with its own blocks; with small ones in the interpreter, so that edges are many."""
    return TritonFA2(SMALL if device == "cpu" else None)


@dataclass(frozen=True)
class OnDevice:
    """A kernel that computes on a device what it is given on CPU."""

    kernel: Kernel
    device: str

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def capabilities(self) -> Any:
        return self.kernel.capabilities

    def forward(self, inputs: QKV, tiles: Any, scores: Scores, state: Any) -> None:
        there = QKV(*(x.to(self.device) for x in inputs))
        partial = Accumulator(there.q, torch.float32, there.v.shape[3])
        self.kernel.forward(there, tiles, self._moved(scores), partial)
        out, lse = partial.result(torch.float32)
        state.add(ALL_ROWS, 0, out.cpu(), lse.cpu())

    def backward(
        self, merged: Output, inputs: QKV, tiles: Any, scores: Scores, gradients: GradientSums
    ) -> None:
        known = Output(*(x.to(self.device) for x in merged))
        there = QKV(*(x.to(self.device) for x in inputs))
        sums = GradientSums.of(*(x.to(self.device) for x in gradients.totals))
        self.kernel.backward(known, there, tiles, self._moved(scores), sums)
        for here, total in zip(gradients.totals, sums.totals, strict=True):
            here.copy_(total)

    def _moved(self, scores: Scores) -> Scores:
        slopes = scores.alibi_slopes
        return replace(scores, alibi_slopes=None if slopes is None else slopes.to(self.device))
