"""Where Triton's kernels are tested: on a CUDA device, or in Triton's interpreter on CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lightning_cp.kernels.api import Kernel, Scores
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.triton_fa2 import TritonFA2, is_installed, is_interpreted
from lightning_cp.kernels.triton_launch import Launch, Launches
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

SMALL = Launches(*[Launch(32, 16)] * 3)


def triton_on(device: str) -> Kernel:
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

    def forward(
        self, q_BLHD: Any, k_BLKD: Any, v_BLKD: Any, tiles: Any, scores: Scores, state: Any
    ) -> None:
        q, k, v = (x.to(self.device) for x in (q_BLHD, k_BLKD, v_BLKD))
        partial = Accumulator(q, torch.float32)
        self.kernel.forward(q, k, v, tiles, self._moved(scores), partial)
        out, lse = partial.result(torch.float32)
        state.add(ALL_ROWS, 0, out.cpu(), lse.cpu())

    def backward(
        self,
        dout_BLHD: Any,
        q_BLHD: Any,
        k_BLKD: Any,
        v_BLKD: Any,
        out_BLHD: Any,
        lse_BHL: Any,
        tiles: Any,
        scores: Scores,
        dq_BLHD: Any,
        dk_BLKD: Any,
        dv_BLKD: Any,
    ) -> None:
        inputs = (dout_BLHD, q_BLHD, k_BLKD, v_BLKD, out_BLHD, lse_BHL)
        dout, q, k, v, out, lse = (x.to(self.device) for x in inputs)
        dq, dk, dv = (x.to(self.device) for x in (dq_BLHD, dk_BLKD, dv_BLKD))
        self.kernel.backward(dout, q, k, v, out, lse, tiles, self._moved(scores), dq, dk, dv)
        for total, here in zip((dq, dk, dv), (dq_BLHD, dk_BLKD, dv_BLKD), strict=True):
            here.copy_(total)

    def _moved(self, scores: Scores) -> Scores:
        slopes = scores.alibi_slopes
        return replace(scores, alibi_slopes=None if slopes is None else slopes.to(self.device))
