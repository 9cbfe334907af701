"""The ring over our Triton kernels, in Triton's interpreter on every rank."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.kernels.triton_fa2 import is_installed, is_interpreted
from tests import oracle
from tests.attention.distributed import attend_all, joined
from tests.attention.problems import SEQUENCES, Grid, Problem
from tests.pool import run_ranks

CELL = Problem(
    (2, 1),
    "rows",
    causal=False,
    window=(9, 4),
    dtype=torch.float32,
    head_dim=32,
    softcap=2.0,
    alibi=2,
    sinks=True,
    max_logits=True,
)


@pytest.mark.skipif(
    not (is_installed() and is_interpreted()),
    reason="needs Triton and TRITON_INTERPRET=1, which tests/conftest.py sets without CUDA",
)
def test_ring_of_two() -> None:
    grid, sequences = Grid(2), SEQUENCES[CELL.sequences]
    shards = run_ranks(2, attend_all, [CELL], grid, "triton", timeout=240)
    answer = joined(CELL, grid, [rank for (rank,) in shards])
    expected = oracle.attention(
        *CELL.tensors(),
        causal=CELL.causal,
        window=CELL.window,
        documents=sequences.documents,
        how=CELL.scores,
    )
    for name, got in answer.items():
        assert oracle.max_error(got, getattr(expected, name)) < 5e-6, name
