"""The attention call that is measured, and the ways to share it among the ranks of a process group.

A *case* is one attention call over a whole sequence, the same for every way to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.layout import Documents, Schedule, SequenceLayout, schedule
from lightning_cp.layout.exchange import EXECUTIONS, Exchange
from lightning_cp.layout.sequence import LayoutKind
from lightning_cp.mesh import ContextParallelMesh

SIGMA = 1.5
"""Standard deviation of the logarithm of document lengths."""
BACKWARD_FLOPS = 2.5
"""FLOPs of backward over those of forward."""


@dataclass(frozen=True)
class AttentionCase:
    """Attention of one sequence, on some ranks; float32 on CPU is the default of the side-by-side tables."""

    tokens: int
    ranks: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: torch.dtype = torch.float32
    device_type: str = "cpu"
    causal: bool = True
    packed: int = 0
    """Documents of log-normal lengths that fill the sequence; 0 is one document."""
    seed: int = 0
    """Seed of the documents' lengths and of the inputs."""
    window: tuple[int, int] = (-1, -1)
    """(left, right) distances still visible; -1 is unbounded."""

    @property
    def spec(self) -> AttentionSpec:
        """The mask: causality and window."""
        return AttentionSpec(causal=self.causal, window=self.window)

    @property
    def documents(self) -> Documents | None:
        """The packed documents, if any."""
        if not self.packed:
            return None
        return log_normal(self.tokens, self.packed, self.seed, SIGMA)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        documents = self.documents
        if documents is None:
            return [self.tokens]
        return [int(end - start) for start, end in documents.rows[0]]

    @property
    def flops(self) -> float:
        """FLOPs of forward: two products of a multiplication and an addition per visible pair and head entry.

        Backward has 2.5 times as many: five products, recomputation of the scores included.
        """
        whole = SequenceLayout(self.tokens, 1, documents=self.documents)
        plan = schedule(whole, self.documents or Documents.single(self.tokens), self.spec.mask)
        return 4.0 * float(sum(plan.work)) * self.head_dim * self.heads * self.batch

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """Return random q, k and v [batch, tokens, heads, head dim] that require gradients."""
        torch.manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        where = {"dtype": self.dtype, "device": self.device_type}
        return [
            torch.randn(self.batch, tokens, h, self.head_dim, **where).requires_grad_()
            for h in heads
        ]


def log_normal(tokens: int, count: int, seed: int, sigma: float) -> Documents:
    """Return one row filled with documents of log-normal lengths."""
    weights = np.random.default_rng(seed).lognormal(sigma=sigma, size=count)
    ends = np.floor(np.cumsum(weights) / weights.sum() * tokens).astype(np.int64)
    ends[-1] = tokens
    return Documents.from_cu_seqlens(np.unique(np.append(0, ends)))


Step = Callable[[], object]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [B, L, H, D], k and v [B, L, K, D] of this rank's tokens -> out [B, L, H, D], differentiable."""


class AttentionMethod(Protocol):
    """One way to compute attention over all ranks of the world."""

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    def obstacle(self, case: AttentionCase) -> str | None:
        """Return the reason why it cannot compute this case here, or ``None``."""
        ...

    def step(self, case: AttentionCase, *, backward: bool = True) -> Step:
        """Return this rank's part with its inputs: forward, or forward and backward."""
        ...


class ShardedMethod(AttentionMethod, Protocol):
    """A way whose layout of tokens is known, so that its results can be checked."""

    def positions(self, case: AttentionCase, rank: int) -> torch.Tensor:
        """Return int64 [L]: the global index of each local token; padding has ``case.tokens`` and above."""
        ...

    def attention(self, case: AttentionCase) -> Attend:
        """Return this rank's call. It makes process groups, so all ranks must call this together."""
        ...


def local_step(way: ShardedMethod, case: AttentionCase, *, backward: bool = True) -> Step:
    """Return a step of this rank on its own random inputs."""
    attend = way.attention(case)
    q, k, v = case.inputs(len(way.positions(case, dist.get_rank())))
    gradient = torch.randn_like(q)

    def step() -> object:
        out = attend(q, k, v)
        return torch.autograd.grad(out, [q, k, v], gradient) if backward else out

    return step


@dataclass(frozen=True)
class ContextParallelMethod:
    """This library's call in one mode. Ranks of a Ulysses group are neighbours."""

    ulysses: int
    ring: int
    exchange: str = "ring"
    forward_execution: str = "two_kernel"
    backward_execution: str = "two_kernel"
    layout: LayoutKind | None = None
    """``None`` is zigzag, or balanced for packed documents: see :meth:`with_layout_of`."""
    kernel: str = "auto"
    kv_heads_per_gather: int | None = 1
    """K/V heads that ``all_gather`` gathers at a time; ``None`` is all."""

    @property
    def name(self) -> str:
        """The mode by its name in the field, with the layout if one is set."""
        given = "" if self.layout is None else f", {self.layout}"
        if self.ring == 1:
            return "ulysses"
        if self.exchange == "all_gather":
            passes = (self.forward_execution, self.backward_execution)
            sizes = "" if self.ulysses == 1 else f" {self.ulysses}x{self.ring}"
            heads = ", all heads at once" if self.kv_heads_per_gather is None else ""
            return f"zigzag_llama3{sizes} {'/'.join(passes)}{heads}{given}"
        if self.ulysses > 1:
            rotation = " rotation" * (self.exchange == "rotation")
            return f"hybrid {self.ulysses}x{self.ring}{rotation}{given}"
        return f"{self.layout or 'zigzag'} {self.exchange}"

    def obstacle(self, case: AttentionCase) -> str | None:
        """Return a message if the heads do not split, else ``None``."""
        if case.heads % self.ulysses:
            return f"{case.heads} heads do not divide by ulysses_size={self.ulysses}"
        return None

    def with_layout_of(self, case: AttentionCase) -> ContextParallelMethod:
        """Return the same with the case's layout set; the names of packed ones then include it."""
        open_ = self.layout is None and case.packed
        return replace(self, layout="balanced") if open_ else self

    def sequence_layout(self, case: AttentionCase) -> SequenceLayout:
        """Return the layout: the tokens that each rank holds."""
        kind: LayoutKind = self.with_layout_of(case).layout or "zigzag"
        return SequenceLayout(case.tokens, self.ring, self.ulysses, kind, case.documents)

    def positions(self, case: AttentionCase, rank: int) -> torch.Tensor:
        """Return the layout's positions of a rank."""
        return self.sequence_layout(case).positions(rank)

    def schedule(self, case: AttentionCase) -> Schedule:
        """Return the schedule: the tiles of each rank."""
        return schedule(self.sequence_layout(case), None, case.spec.mask)

    @property
    def exchange_options(self) -> Exchange:
        """The exchange and its options."""
        executions = (self.forward_execution, self.backward_execution)
        return Exchange(self.exchange, *executions, self.kv_heads_per_gather)

    def attention(self, case: AttentionCase) -> Attend:
        """Return the call, on a new mesh."""
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

    def step(self, case: AttentionCase, *, backward: bool = True) -> Step:
        """Return attention of this rank's tokens, with the gradients of its q, k and v."""
        return local_step(self, case, backward=backward)


def context_parallel_methods(
    ranks: int, kv_heads: Sequence[int | None] = (1,)
) -> list[ContextParallelMethod]:
    """Return every mode: all splits into Ulysses and ring, and all executions of zigzag_llama3.

    Args:
        ranks: size of the cp group.
        kv_heads: numbers of K/V heads that zigzag_llama3 gathers at a time; one way for each.
    """
    splits = [(u, ranks // u) for u in range(ranks, 0, -1) if ranks % u == 0]
    passes = [(f, b) for f in EXECUTIONS for b in EXECUTIONS] if ranks > 1 else []
    return [
        *(ContextParallelMethod(*split) for split in splits),
        *(
            ContextParallelMethod(1, ranks, "all_gather", *executions, kv_heads_per_gather=heads)
            for heads in kv_heads
            for executions in passes
        ),
    ]
