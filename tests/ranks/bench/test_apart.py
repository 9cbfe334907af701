"""Without compute a call sends what it always sends; without communication it computes as always."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.bench.methods import (
    AttentionCase,
    ContextParallelMethod,
    Step,
    context_parallel_methods,
)
from lightning_cp.bench.modes import plan_of, separate_runs
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Capabilities, Kernel, Output, Scores
from lightning_cp.layout import Tile
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.attention.wire import Message, Wire
from tests.helpers.pool import run_ranks

RANKS = 4
WAYS = context_parallel_methods(RANKS)


@dataclass(frozen=True)
class Counted:
    """A kernel that notes its calls and then makes them."""

    real: Kernel
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.real.name

    @property
    def capabilities(self) -> Capabilities:
        return self.real.capabilities

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        self.calls.append(("forward", *(tuple(x.shape) for x in inputs), tuple(tiles)))
        self.real.forward(inputs, tiles, scores, state)

    def backward(
        self,
        merged: Output,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        self.calls.append(("backward", *(tuple(x.shape) for x in inputs), tuple(tiles)))
        self.real.backward(merged, inputs, tiles, scores, gradients)


class Backends(TorchDispatchMode):
    """Which backends the operations of torch.distributed in the block went to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            groups = (x for x in args if isinstance(x, torch.ScriptObject))
            kinds = (x for x in groups if "ProcessGroup" in str(x._type()))
            unboxed = (dist.ProcessGroup.unbox(x) for x in kinds)
            self.names |= {x._get_backend(torch.device("cpu")).name() for x in unboxed}
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """Every operation of the block but collectives: its name, and the shapes of the tensors that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "c10d":
            given = (tuple(x.shape) for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            self.operations.append((str(func), *given))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Found:
    """What one run of one rank did."""

    calls: list[tuple[Any, ...]]
    sent: list[Message]
    backends: set[str]
    operations: list[tuple[Any, ...]]


def observe(step: Step, kernel: Counted, ulysses_rank: int) -> Found:
    kernel.calls.clear()
    with Wire(ulysses_rank) as wire:
        step()
    with Backends() as backends, Dispatched() as dispatched:
        step()
    half = len(kernel.calls) // 2
    assert kernel.calls[:half] == kernel.calls[half:]
    return Found(kernel.calls[:half], wire.messages, backends.names, dispatched.operations)


def four_runs(
    rank: int, world_size: int, way: ContextParallelMethod, case: AttentionCase, backward: bool
) -> dict[str, Found]:
    mesh = ContextParallelMesh(way.ring, way.ulysses)
    inputs = case.inputs(way.sequence_layout(case).local_len)
    plan = plan_of(way, case, inputs, mesh)
    kernel = Counted(plan.kernel)
    with separate_runs(replace(plan, kernel=kernel), inputs, backward=backward) as apart:
        found = {
            name: observe(step, kernel, mesh.ulysses_rank) for name, step in vars(apart).items()
        }
    mesh.destroy()
    return found


@pytest.mark.quick(
    "zigzag ring-packed",
    "zigzag_llama3 two_kernel/two_kernel-packed",
    "zigzag_llama3 two_kernel/fused-packed",
    "zigzag_llama3 fused/fused-packed",
)
@pytest.mark.parametrize("packed", [0, 5], ids=["dense", "packed"])
@pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
def test_the_same_messages_and_the_same_kernel_calls(
    way: ContextParallelMethod, packed: int
) -> None:
    case = AttentionCase(64, RANKS, heads=4, kv_heads=2, head_dim=8, packed=packed)
    for found in run_ranks(RANKS, four_runs, way, case, True):
        both, compute, comm, neither = (
            found[name] for name in ("both", "compute", "comm", "neither")
        )
        assert both.calls
        assert both.sent
        assert both.backends == comm.backends == {"gloo"}
        assert comm.sent == compute.sent == neither.sent == both.sent
        assert compute.calls == both.calls
        assert compute.operations == both.operations
        assert neither.operations == comm.operations
        assert len(comm.operations) < len(both.operations)
        assert comm.calls == neither.calls == []
        assert compute.backends == neither.backends == {"fake"}


def test_forward_alone_has_no_backward() -> None:
    case = AttentionCase(64, 2, heads=4, kv_heads=2, head_dim=8)
    (found, _) = run_ranks(2, four_runs, ContextParallelMethod(1, 2), case, False)
    assert {name for name, *_ in found["both"].calls} == {"forward"}
    assert found["comm"].sent == found["both"].sent


def whole_call(
    rank: int, world_size: int, way: ContextParallelMethod, case: AttentionCase
) -> tuple[bool, bool]:
    """Whether what is timed is the call: the same gradients to the bit; alone they are others."""
    mesh = ContextParallelMesh(way.ring, way.ulysses)
    layout = way.sequence_layout(case)
    q, k, v = case.inputs(layout.local_len)
    torch.manual_seed(5)
    gradient = torch.randn_like(q)
    out = context_parallel_attention(q, k, v, mesh=mesh, layout=layout, spec=case.spec)
    expected = torch.autograd.grad(out, [q, k, v], gradient)
    torch.manual_seed(5)
    with separate_runs(plan_of(way, case, [q, k, v], mesh), [q, k, v], backward=True) as apart:
        both: Any = apart.both()
        compute: Any = apart.compute()
    mesh.destroy()
    same = [
        all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
        for got in (both, compute)
    ]
    return same[0], same[1]


def test_what_is_timed_is_the_call() -> None:
    case = AttentionCase(64, 2, heads=4, kv_heads=2, head_dim=8)
    assert run_ranks(2, whole_call, ContextParallelMethod(1, 2), case) == [(True, False)] * 2
