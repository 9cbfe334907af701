"""Ways to compute a case on the ranks of a process group: ours, and one process as the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.attention.exchange import Exchange
from lightning_cp.bench.case import Case
from lightning_cp.layout import HeadSplit, Schedule, SequenceLayout, schedule
from lightning_cp.layout.gathered import EXECUTIONS
from lightning_cp.layout.sequence import LayoutKind
from lightning_cp.mesh import ContextParallelMesh

Step = Callable[[], object]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [B, L, H, D], k and v [B, L, K, D] of this rank's tokens -> out [B, L, H, D], differentiable."""


class Way(Protocol):
    """One way to compute attention over all ranks of the world."""

    @property
    def name(self) -> str:
        """As a table shows it."""
        ...

    def obstacle(self, case: Case) -> str | None:
        """Why it cannot compute this case here, or ``None``."""
        ...

    def step(self, case: Case, *, backward: bool = True) -> Step:
        """This rank's part, with its inputs made: forward, or forward and backward."""
        ...


class Sharded(Way, Protocol):
    """A way of which it is known who holds which tokens, so that its results can be checked."""

    def positions(self, case: Case, rank: int) -> torch.Tensor:
        """int64 [L]: global index of each local token; padding has indices from ``case.tokens`` on."""
        ...

    def attention(self, case: Case) -> Attend:
        """This rank's call; makes process groups, so that all ranks ask for it together."""
        ...


def local_step(way: Sharded, case: Case, *, backward: bool = True) -> Step:
    """A step of this rank on random inputs of its own."""
    attend = way.attention(case)
    q, k, v = case.inputs(len(way.positions(case, dist.get_rank())))
    gradient = torch.randn_like(q)

    def step() -> object:
        out = attend(q, k, v)
        return torch.autograd.grad(out, [q, k, v], gradient) if backward else out

    return step


@dataclass(frozen=True)
class Ours:
    """This library's call. Ranks of a Ulysses group are neighbours."""

    ulysses: int
    ring: int
    exchange: str = "ring"
    forward_execution: str = "two_kernel"
    backward_execution: str = "two_kernel"
    layout: LayoutKind | None = None
    """``None`` is zigzag, or balanced for packed documents: see :meth:`dealt`."""
    kernel: str = "auto"
    kv_heads_per_gather: int | None = 1
    """Of ``all_gather``; ``None`` is all of them."""

    @property
    def name(self) -> str:
        """The mode, as the field calls it; with the layout if it is given."""
        given = "" if self.layout is None else f", {self.layout}"
        if self.ring == 1:
            return "ulysses"
        if self.exchange == "all_gather":
            passes = (self.forward_execution, self.backward_execution)
            sizes = "" if self.ulysses == 1 else f" {self.ulysses}x{self.ring}"
            heads = ", all heads at once" if self.kv_heads_per_gather is None else ""
            return f"zigzag_llama3{sizes} {'/'.join(passes)}{heads}{given}"
        if self.ulysses > 1:
            return f"hybrid {self.ulysses}x{self.ring}{given}"
        return f"{self.layout or 'zigzag'} ring"

    def obstacle(self, case: Case) -> str | None:
        """Heads that do not split."""
        if case.heads % self.ulysses:
            return f"{case.heads} heads do not divide by ulysses_size={self.ulysses}"
        return None

    def dealt(self, case: Case) -> Ours:
        """The same with the layout that it has for a case, which belongs into the name of packed ones."""
        open_ = self.layout is None and case.packed
        return replace(self, layout="balanced") if open_ else self

    def sequence_layout(self, case: Case) -> SequenceLayout:
        """Which tokens each rank holds."""
        kind: LayoutKind = self.dealt(case).layout or "zigzag"
        return SequenceLayout(case.tokens, self.ring, self.ulysses, kind, case.documents)

    def positions(self, case: Case, rank: int) -> torch.Tensor:
        """As the layout has them."""
        return self.sequence_layout(case).positions(rank)

    def schedule(self, case: Case) -> Schedule:
        """Who computes what."""
        return schedule(self.sequence_layout(case), None, case.spec.mask)

    def head_split(self, case: Case) -> HeadSplit:
        """Which heads each Ulysses rank has."""
        return HeadSplit(case.heads, case.kv_heads, self.ulysses)

    @property
    def how(self) -> Exchange:
        """The exchange that it asks for."""
        executions = (self.forward_execution, self.backward_execution)
        return Exchange(self.exchange, *executions, self.kv_heads_per_gather)

    def attention(self, case: Case) -> Attend:
        """The call, on a mesh of its own."""
        mesh = ContextParallelMesh(self.ring, self.ulysses, case.device_type)
        layout, spec = self.sequence_layout(case), case.spec

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return context_parallel_attention(
                *(q, k, v),
                mesh=mesh,
                layout=layout,
                spec=spec,
                exchange=self.exchange,
                kernel=self.kernel,
                forward_execution=self.forward_execution,
                backward_execution=self.backward_execution,
                kv_heads_per_gather=self.kv_heads_per_gather,
            )

        return attend

    def step(self, case: Case, *, backward: bool = True) -> Step:
        """Attention of this rank's tokens, and the gradients of its q, k and v."""
        return local_step(self, case, backward=backward)


@dataclass(frozen=True)
class OneProcess:
    """PyTorch's attention over the whole sequence, one call per document, and nothing but the kernel.

    Documents are tensors of their own from the beginning, and their results and gradients stay so. Views of
    one packed tensor would cost a copy of dq, dk and dv, as autograd joins the gradients of views (of one
    document too): a kernel for packed sequences does not pay it, so a ratio to it would flatter the ranks.
    """

    name: str = "one process"

    def obstacle(self, case: Case) -> str | None:
        """It computes every case but windows, alone."""
        if case.window != (-1, -1):
            return "scaled_dot_product_attention has no window"
        return None if case.ranks == 1 else "is for one rank"

    def step(self, case: Case, *, backward: bool = True) -> Callable[[], list[torch.Tensor]]:
        """The whole sequence on this rank.

        Returns:
            A step that returns ``out`` [B, L, H, D] of each document; then their dq, dk and dv, document by
            document, if there is a backward.
        """
        whole = [x.detach() for x in case.inputs(case.tokens)]
        gradient = torch.randn_like(whole[0])
        documents = list(zip(*(x.split(case.lengths, dim=1) for x in whole), strict=True))
        inputs = [x.requires_grad_() for document in documents for x in document]
        gradients = gradient.split(case.lengths, dim=1)

        def step() -> list[torch.Tensor]:
            outs = [_attend_whole(*document, causal=case.causal) for document in documents]
            if not backward:
                return outs
            return [*outs, *torch.autograd.grad(outs, inputs, gradients)]

        return step


def _attend_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def our_ways(ranks: int, kv_heads: Sequence[int | None] = (1,)) -> list[Ours]:
    """Every mode on so many ranks: all splits into Ulysses and ring, and the executions of zigzag_llama3.

    Args:
        ranks: of the cp group.
        kv_heads: K/V heads that zigzag_llama3 gathers at a time; each of them is a way.
    """
    splits = [(u, ranks // u) for u in range(ranks, 0, -1) if ranks % u == 0]
    passes = [(f, b) for f in EXECUTIONS for b in EXECUTIONS] if ranks > 1 else []
    return [
        *(Ours(*split) for split in splits),
        *(
            Ours(1, ranks, "all_gather", *executions, kv_heads_per_gather=heads)
            for heads in kv_heads
            for executions in passes
        ),
    ]
