"""The baseline is right, and pays for the kernel alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.one_process import OneProcess
from lightning_cp.bench.methods import AttentionCase
from tests.helpers import oracle

CASE = AttentionCase(96, 1, 4, 4, 8, dtype=torch.float64)
KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}


class Written(TorchDispatchMode):
    """Operations whose results are no views of what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [0, 5])
def test_one_process_calls_the_kernel_and_copies_nothing(packed: int) -> None:
    case = AttentionCase(96, 1, 4, 4, 8, packed=packed)
    step = OneProcess().step(case)
    with Written() as written:
        step()
    assert len(written.names) == 2 * len(case.lengths)
    assert set(written.names) == KERNELS


@pytest.mark.parametrize("packed", [0, 5])
def test_one_process_is_attention(packed: int) -> None:
    case = AttentionCase(96, 1, 4, 2, 8, dtype=torch.float64, packed=packed)
    q, k, v = (x.detach() for x in case.inputs(case.tokens))
    dout = torch.randn_like(q)  # as the step draws it, after its inputs
    count = len(case.lengths)
    found = OneProcess().step(case)()
    outs, gradients = found[:count], found[count:]
    parts = zip(*(x.split(case.lengths, dim=1) for x in (q, k, v, dout)), strict=True)
    for index, part in enumerate(parts):
        want = oracle.attention(*part, causal=True)
        got = (outs[index], *gradients[3 * index : 3 * index + 3])
        for x, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
            torch.testing.assert_close(x, getattr(want, name), rtol=1e-10, atol=1e-10)
