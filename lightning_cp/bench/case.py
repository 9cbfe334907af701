"""What is measured: one attention call over a whole sequence, the same for every way to compute it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.layout import Documents, SequenceLayout, schedule

SIGMA = 1.5
"""Of the logarithm of the documents' lengths."""
BACKWARD_FLOPS = 2.5
"""Over those of forward."""


@dataclass(frozen=True)
class Case:
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
    """Of the documents' lengths and of the inputs."""
    window: tuple[int, int] = (-1, -1)
    """(left, right) distances still visible; -1 is unbounded."""

    @property
    def spec(self) -> AttentionSpec:
        """What a query may see."""
        return AttentionSpec(causal=self.causal, window=self.window)

    @property
    def documents(self) -> Documents | None:
        """The packed documents, if any."""
        if not self.packed:
            return None
        return log_normal(self.tokens, self.packed, self.seed, SIGMA)

    @property
    def lengths(self) -> list[int]:
        """Of the documents."""
        documents = self.documents
        if documents is None:
            return [self.tokens]
        return [int(end - start) for start, end in documents.rows[0]]

    @property
    def flops(self) -> float:
        """Of forward: two products of a multiplication and an addition per visible pair and head entry.

        Backward has 2.5 times as many (five products), recomputation of the scores counted.
        """
        whole = SequenceLayout(self.tokens, 1, documents=self.documents)
        plan = schedule(whole, self.documents or Documents.single(self.tokens), self.spec.mask)
        return 4.0 * float(sum(plan.work)) * self.head_dim * self.heads * self.batch

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """Random q, k and v [batch, tokens, heads, head dim] that want gradients."""
        torch.manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        where = {"dtype": self.dtype, "device": self.device_type}
        return [
            torch.randn(self.batch, tokens, h, self.head_dim, **where).requires_grad_()
            for h in heads
        ]


def log_normal(tokens: int, count: int, seed: int, sigma: float) -> Documents:
    """One row filled with documents of log-normal lengths."""
    weights = np.random.default_rng(seed).lognormal(sigma=sigma, size=count)
    ends = np.floor(np.cumsum(weights) / weights.sum() * tokens).astype(np.int64)
    ends[-1] = tokens
    return Documents.from_cu_seqlens(np.unique(np.append(0, ends)))
