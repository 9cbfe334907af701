"""Attention problems, the oracle's answer to them, and a kernel's answer through a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Kernel, Output, Scores, accumulate_dtype
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import Hop, Tile, schedule
from tests.helpers import oracle

SCALE = 0.3
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}
"""Largest difference over the largest entry; the inputs of the dense answer are rounded alike."""


class Answer(NamedTuple):
    """Output and gradients [B, S, H or K, D] and log-sum-exp [B, H, S] of a whole sequence."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@dataclass(frozen=True)
class Problem:
    """One attention problem over a whole sequence; ``intervals`` are the documents of each row."""

    mask: Mask
    heads: tuple[int, int] = (4, 2)
    intervals: tuple[tuple[tuple[int, int], ...], ...] | None = None
    dtype: torch.dtype = torch.float64
    seq_len: int = 53
    head_dim: int = 8
    batch: int = 2
    how: oracle.Scores = oracle.PLAIN
    """What is done to scaled scores; sinks are no kernel's matter."""
    value_dim: int | None = None
    """Head dim of v; that of q and k by default."""

    @property
    def documents(self) -> Documents | None:
        """The documents in the package's terms."""
        if self.intervals is None:
            return None
        return Documents([np.array(row, dtype=np.int64) for row in self.intervals], self.seq_len)

    def visible(self) -> torch.Tensor:
        """bool [B or 1, S, S]: whether a query sees a key."""
        return oracle.visible_pairs(
            self.seq_len,
            causal=self.mask.causal,
            window=self.mask.window,
            documents=self.intervals,
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v and dout, the same ones each time."""
        generator = torch.Generator().manual_seed(7)
        heads, kv_heads = self.heads

        def draw(count: int, dim: int) -> torch.Tensor:
            shape = (self.batch, self.seq_len, count, dim)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(self.dtype)

        dim, of_values = self.head_dim, self.value_dim or self.head_dim
        of_keys = draw(heads, dim), draw(kv_heads, dim)
        return *of_keys, draw(kv_heads, of_values), draw(heads, of_values)


@lru_cache(maxsize=256)
def dense(problem: Problem) -> Answer:
    """The answer in float64."""
    return dense_attention(*problem.tensors(), problem.visible(), problem.how)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    visible: torch.Tensor,
    how: oracle.Scores = oracle.PLAIN,
) -> Answer:
    """The oracle's answer, given ``visible`` [B or 1, queries, keys]."""
    found = oracle.attend(q, k, v, dout, visible, SCALE, how)
    return Answer(*(getattr(found, name) for name in Answer._fields))


def sharded(
    problem: Problem, kernel: Kernel, layout: SequenceLayout, num_hops: int | None = None
) -> Answer:
    """The kernel's answer: every ring rank of ``layout``, with all or ``num_hops`` of its hops."""
    q, k, v, dout = problem.tensors()
    ranks = range(layout.ring_size)
    parts = [Rank(problem, kernel, layout, rank, num_hops) for rank in ranks]
    outs, lses = zip(*(part.forward(q, k, v) for part in parts), strict=True)
    gradients = [_zeros(layout.shard(x, rank)) for rank in ranks for x in (k, v)]
    dk, dv = gradients[0::2], gradients[1::2]
    dq = [parts[r].backward(dout, q, k, v, outs[r], lses[r], dk, dv) for r in ranks]
    joined = (layout.unshard(shards, dim=1) for shards in (outs, dq, dk, dv))
    out, *rest = joined
    return Answer(out, layout.unshard(lses, dim=2), *rest)


class Rank:
    """What one ring rank computes, with the keys of other ranks at hand."""

    def __init__(
        self,
        problem: Problem,
        kernel: Kernel,
        layout: SequenceLayout,
        rank: int,
        num_hops: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.layout = layout
        self.rank = rank
        how, self.dtype = problem.how, problem.dtype
        mask = replace(problem.mask, uses_distance=how.alibi_slopes is not None)
        self.scores = Scores(SCALE, mask, how.softcap, how.alibi_slopes, how.max_logits)
        self.state: Accumulator | None = None
        plan = schedule(layout, problem.documents, mask).rank(rank)
        self.hops = plan.hops[:num_hops]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` and ``lse`` of this rank's queries."""
        queries = self.layout.shard(q, self.rank)
        state = self.state = Accumulator(queries, accumulate_dtype(self.dtype), v.shape[3])
        for hop in self.hops:
            keys, values = self._received(hop, k), self._received(hop, v)
            inputs = QKV(queries, keys, values)
            self.kernel.forward(inputs, hop.packed_tiles, self.scores, state)
        return state.result(self.dtype)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dk: list[torch.Tensor],
        dv: list[torch.Tensor],
    ) -> torch.Tensor:
        """``dq``; adds to the ``dk, dv`` of every rank."""
        queries, douts = self.layout.shard(q, self.rank), self.layout.shard(dout, self.rank)
        dq, merged = _zeros(queries), Output(douts, out, lse)
        for hop in self.hops:
            keys, values = self._received(hop, k), self._received(hop, v)
            dkeys, dvalues = _zeros(keys), _zeros(values)
            inputs, gradients = QKV(queries, keys, values), GradientSums.of(dq, dkeys, dvalues)
            self.kernel.backward(merged, inputs, hop.packed_tiles, self.scores, gradients)
            at = 0
            for start, end in hop.recv:
                dk[hop.source][:, start:end] += dkeys[:, at : at + end - start]
                dv[hop.source][:, start:end] += dvalues[:, at : at + end - start]
                at += end - start
        return dq

    def _received(self, hop: Hop, x: torch.Tensor) -> torch.Tensor:
        """The ranges of the hop's keys that travel, end to end."""
        local = self.layout.shard(x, hop.source)
        return torch.cat([local[:, :0], *(local[:, start:end] for start, end in hop.recv)], dim=1)


def run(
    kernel: Kernel,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tiles: Sequence[Tile],
    mask: Mask,
) -> Answer:
    """The kernel's answer for one list of tiles over q, k, v and dout."""
    q, k, v, dout = tensors
    scores = Scores(SCALE, mask)
    state = Accumulator(q, accumulate_dtype(q.dtype), v.shape[3])
    inputs, gradients = QKV(q, k, v), GradientSums.of(*(_zeros(x) for x in (q, k, v)))
    kernel.forward(inputs, tiles, scores, state)
    out, lse = state.result(q.dtype)
    kernel.backward(Output(dout, out, lse), inputs, tiles, scores, gradients)
    return Answer(out, lse, *gradients.totals)


def errors(answer: Answer, expected: Answer) -> dict[str, float]:
    """Largest difference over the largest entry (if not 0), for each of out, lse, dq, dk and dv."""
    found: dict[str, float] = {}
    for name, got, want in zip(Answer._fields, answer, expected, strict=True):
        assert got.shape == want.shape
        unseen = want == -torch.inf
        same = torch.equal(got == -torch.inf, unseen)
        difference = (got.double() - want).masked_fill(unseen, 0.0).abs().max()
        largest = want.masked_fill(unseen, 0.0).abs().max()
        found[name] = float(difference / (largest or 1.0)) if same else torch.inf
    return found


def check(answer: Answer, problem: Problem) -> None:
    """Fail unless the answer is the dense one to rounding."""
    check_errors(errors(answer, dense(problem)), TOLERANCE[problem.dtype])


def check_errors(found: dict[str, float], limit: float) -> None:
    """Fail unless every error is within the limit."""
    # `not <=` so that NaN fails too.
    worse = {name: error for name, error in found.items() if not error <= limit}
    assert not worse, f"{worse} above {limit}"


def is_wrong(answer: Answer, problem: Problem, name: str) -> bool:
    """Whether one entry of the answer is far from the dense one."""
    return not errors(answer, dense(problem))[name] <= 1000 * TOLERANCE[problem.dtype]


def with_tiles(kernel: Kernel, change: Callable[..., object]) -> Kernel:
    """The kernel, given ``change(tiles)`` instead of the tiles."""

    class Changed:
        name = f"changed_{kernel.name}"
        capabilities = kernel.capabilities

        def forward(self, *args: object) -> None:
            kernel.forward(args[0], change(args[1]), *args[2:])  # type: ignore[arg-type]

        def backward(self, *args: object) -> None:
            kernel.backward(*args[:2], change(args[2]), *args[3:])  # type: ignore[arg-type]

    return Changed()  # type: ignore[return-value]


def in_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same problem with rounded inputs."""
    return replace(problem, dtype=dtype)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=accumulate_dtype(x.dtype))
