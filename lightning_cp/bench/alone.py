"""One rank's attention call without the others: the real code over a process group that moves nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp.attention import ring
from lightning_cp.attention.function import ContextParallelAttention
from lightning_cp.attention.plan import AttentionPlan, make_plan
from lightning_cp.bench.case import Case
from lightning_cp.bench.ways import Ours
from lightning_cp.comm.ring import Transfer
from lightning_cp.kernels.api import Kernel
from lightning_cp.mesh import ContextParallelMesh


class Kept:
    """What autograd would keep between the passes: its engine cannot run on tensors without memory."""

    saved_tensors: tuple[torch.Tensor, ...] = ()
    needs_input_grad = (True, True, True, False)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """As autograd's context."""
        self.saved_tensors = tensors

    def maybe_clear_saved_tensors(self) -> None:
        """As autograd's context where the graph is kept: a backward may be repeated."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """As autograd's context."""


@dataclass
class OneRank:
    """The passes of one rank; what others would send is memory as it was found."""

    plan: AttentionPlan
    inputs: list[torch.Tensor]
    """q, k and v [batch, local tokens, heads, head dim]."""
    dout: torch.Tensor
    arrivals: Arrivals | None = None
    """In the place of messages."""
    kept: Kept = field(default_factory=Kept)

    def forward(self) -> torch.Tensor:
        """``out`` of this rank's tokens."""
        self._begin()
        out, *_ = ContextParallelAttention.forward(self.kept, *self.inputs, None, self.plan, None)  # pyright: ignore
        return out

    def backward(self) -> tuple[Any, ...]:
        """Gradients of q, k and v; after a forward."""
        self._begin()
        return ContextParallelAttention.backward(self.kept, self.dout, None)

    def _begin(self) -> None:
        if self.arrivals is not None:
            self.arrivals.begin()


class Arrivals:
    """In the place of ``start_transfer``: nothing is sent, and what is received lies there already.

    Each transfer of a pass has memory of its own, as one that has been read is still in the caches, where
    what has just arrived is not. The next pass finds the same memory.
    """

    def __init__(self) -> None:
        self._made: defaultdict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]]
        self._made = defaultdict(list)
        self._taken: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()

    def begin(self) -> None:
        """A pass begins."""
        self._taken.clear()

    def __call__(
        self,
        send: torch.Tensor | None,
        dest: int,
        receive_shape: Sequence[int] | None,
        source: int,
        like: torch.Tensor,
        group: object,
    ) -> Transfer:
        """A transfer that is over."""
        if receive_shape is None:
            return Transfer(None, send, [])
        key = tuple(receive_shape), like.dtype
        made, index = self._made[key], self._taken[key]
        if index == len(made):
            made.append(torch.randn(key[0], dtype=like.dtype, device=like.device))
        self._taken[key] += 1
        return Transfer(made[index], send, [])


@contextmanager
def one_rank(
    way: Ours,
    case: Case,
    rank: int,
    kernel: Kernel | None = None,
    *,
    arrived: bool = False,
    memory: bool = True,
) -> Iterator[OneRank]:
    """This process as one rank of ``case.ranks``; it must be in no process group.

    Args:
        way: the mode, and which kernel.
        case: what is computed, and on which device.
        rank: of the cp group.
        kernel: in place of the way's, whatever it says that it can run on.
        arrived: what a ring would receive is random numbers made once, each hop's its own, and no memory
            that is asked for. After the first forward and backward all of it is there.
        memory: ``False``: tensors have none (PyTorch's fake tensors), in the block and outside.
    """
    with _rank_of(way, case, rank) as mesh, nullcontext() if memory else FakeTensorMode():
        layout = way.sequence_layout(case)
        q, k, v = (x.detach() for x in case.inputs(layout.local_len))
        spec = case.spec
        asked = way.kernel if kernel is None else "reference"
        plan = make_plan(q, k, v, mesh, layout, spec, asked, exchange=way.how)
        if kernel is not None:
            plan = replace(plan, kernel=kernel)
        arrivals = Arrivals() if arrived else None
        with patch.object(ring, "start_transfer", arrivals) if arrived else nullcontext():
            yield OneRank(plan, [q, k, v], torch.randn_like(q), arrivals)


@contextmanager
def _rank_of(way: Ours, case: Case, rank: int) -> Iterator[ContextParallelMesh]:
    store: Any = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=case.ranks, store=store)
    try:
        yield ContextParallelMesh(way.ring, way.ulysses, device_type="cpu")
    finally:
        dist.destroy_process_group()
