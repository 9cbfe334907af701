"""One rank's attention call without the other ranks: the real code over a group that moves nothing."""

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
from lightning_cp.bench.methods import AttentionCase, ContextParallelMethod
from lightning_cp.comm.transfer import Transfer
from lightning_cp.kernels.protocol import Kernel
from lightning_cp.mesh import ContextParallelMesh


class SavedTensors:
    """A stand-in for autograd's context: its engine cannot run on tensors without memory."""

    saved_tensors: tuple[torch.Tensor, ...] = ()
    needs_input_grad = (True, True, True, False)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Store tensors, as autograd's context does."""
        self.saved_tensors = tensors

    def maybe_clear_saved_tensors(self) -> None:
        """Keep the tensors, as autograd's context does with ``retain_graph``: a backward may be repeated."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Do nothing."""


@dataclass
class OneRank:
    """The passes of one rank; messages of other ranks are uninitialised memory."""

    plan: AttentionPlan
    inputs: list[torch.Tensor]
    """q, k and v [batch, local tokens, heads, head dim]."""
    dout: torch.Tensor
    arrivals: Arrivals | None = None
    """Replacement of messages."""
    saved: SavedTensors = field(default_factory=SavedTensors)

    def forward(self) -> torch.Tensor:
        """Return ``out`` of this rank's tokens."""
        self._begin()
        out, *_ = ContextParallelAttention.forward(self.saved, *self.inputs, None, self.plan, None)  # pyright: ignore
        return out

    def backward(self) -> tuple[Any, ...]:
        """Return gradients of q, k and v; call it after a forward."""
        self._begin()
        return ContextParallelAttention.backward(self.saved, self.dout, None)

    def _begin(self) -> None:
        if self.arrivals is not None:
            self.arrivals.begin()


class Arrivals:
    """Replacement of ``start_transfer``: nothing is sent, and received tensors already exist.

    Each transfer of a pass has separate memory: a tensor that was read before is still in the caches, while
    data that has just arrived is not. The next pass uses the same memory.

    Args:
        depth: messages of one size that have memory of their own; the next one uses the first's. ``None``:
            all of them.
    """

    def __init__(self, depth: int | None = None) -> None:
        self.depth = depth
        self._made: defaultdict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]]
        self._made = defaultdict(list)
        self._taken: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()

    def begin(self) -> None:
        """Begin a pass."""
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
        """Return a finished transfer."""
        if receive_shape is None:
            return Transfer(None, send, [])
        key = tuple(receive_shape), like.dtype
        made, index = self._made[key], self._taken[key]
        if self.depth is not None:
            index %= self.depth
        if index == len(made):
            made.append(torch.randn(key[0], dtype=like.dtype, device=like.device))
        self._taken[key] += 1
        return Transfer(made[index], send, [])


@contextmanager
def one_rank(
    way: ContextParallelMethod,
    case: AttentionCase,
    rank: int,
    kernel: Kernel | None = None,
    *,
    arrived: bool = False,
    memory: bool = True,
) -> Iterator[OneRank]:
    """Run this process as one rank of ``case.ranks``; it must not be in a process group.

    Args:
        way: the mode and the kernel.
        case: the attention call and its device.
        rank: rank in the cp group.
        kernel: replaces the way's kernel, whatever its capabilities are.
        arrived: a ring receives random numbers that are made once, separate for each hop, instead of new
            memory. All of them exist after the first forward and backward.
        memory: ``False``: tensors have no memory (PyTorch's fake tensors), in the block and outside.
    """
    with _rank_of(way, case, rank) as mesh, nullcontext() if memory else FakeTensorMode():
        layout = way.sequence_layout(case)
        q, k, v = (x.detach() for x in case.inputs(layout.local_len))
        spec = case.spec
        asked = way.kernel if kernel is None else "reference"
        plan = make_plan(q, k, v, mesh, layout, spec, asked, exchange=way.exchange_options)
        if kernel is not None:
            plan = replace(plan, kernel=kernel)
        arrivals = Arrivals() if arrived else None
        with patch.object(ring, "start_transfer", arrivals) if arrived else nullcontext():
            yield OneRank(plan, [q, k, v], torch.randn_like(q), arrivals)


@contextmanager
def _rank_of(
    way: ContextParallelMethod, case: AttentionCase, rank: int
) -> Iterator[ContextParallelMesh]:
    store: Any = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=case.ranks, store=store)
    try:
        yield ContextParallelMesh(way.ring, way.ulysses, device_type="cpu")
    finally:
        dist.destroy_process_group()
