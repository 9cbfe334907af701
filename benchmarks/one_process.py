"""The baseline of attention benchmarks: one process with the whole sequence and nothing but the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lightning_cp.bench.methods import AttentionCase


@dataclass(frozen=True)
class OneProcess:
    """PyTorch's attention over the whole sequence, one call per document.

    Every document has separate tensors, and so have its results and gradients. Views of one packed tensor
    would cost a copy of dq, dk and dv, because autograd joins the gradients of views (of one document too). A
    kernel for packed sequences does not pay for that copy, so ratios to it would flatter the ranks.
    """

    name: str = "one process"

    def obstacle(self, case: AttentionCase) -> str | None:
        """Return a message for windows and for several ranks, else ``None``."""
        if case.window != (-1, -1):
            return "scaled_dot_product_attention has no window"
        return None if case.ranks == 1 else "is for one rank"

    def step(
        self, case: AttentionCase, *, backward: bool = True
    ) -> Callable[[], list[torch.Tensor]]:
        """Return a step over the whole sequence on this rank.

        Returns:
            A step that returns ``out`` [B, L, H, D] of each document; with backward also dq, dk and dv,
            document by document.
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
