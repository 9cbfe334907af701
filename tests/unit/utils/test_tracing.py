"""Tensors that a compiler traces are known also where PyTorch does not say that it compiles."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from lightning_cp.utils.tracing import is_traced


def test_tensors_of_a_compiler_are_known_by_their_kind() -> None:
    x = torch.ones(2)
    with FunctionalTensorMode():
        functional = FunctionalTensor.to_functional(x)
    assert is_traced(FakeTensorMode().from_tensor(x))
    assert is_traced(functional)
    assert not is_traced(x)
    assert not is_traced(None)


def test_a_graph_s_tensors_are_known() -> None:
    @torch.compile(backend="eager")
    def added(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if is_traced(x) else x

    assert torch.equal(added(torch.ones(2)), torch.full((2,), 2.0))
