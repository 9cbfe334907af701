"""Orthogonalisation of a matrix by Newton-Schulz' quintic iteration, its cost, and the scale of a step."""

from __future__ import annotations

import math

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Keller Jordan's Muon (kellerjordan.github.io/posts/muon): steep at 0, and within 0.7 and
1.2 near 1.
"""
EPS = 1e-7
STEPS = 5


def orthogonalise(
    x: torch.Tensor,
    steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
) -> torch.Tensor:
    """Nearly ``U V'`` of ``x = U S V'``, in the dtype of ``x``: [m, n].

    With X divided by its Frobenius norm, each step is ``X <- a X + (b A + c A^2) X``, ``A = X X'``.

    Args:
        x: [m, n]; overwritten.
        steps: number of steps.
        coefficients: a, b, c.
        eps: lower bound of the norm that ``x`` is divided by.
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def newton_schulz_flops(rows: int, columns: int, steps: int = STEPS) -> int:
    """Of the products of matrices, in each step: X X' and the last ``2 s^2 l``, A^2 ``2 s^3`` (s <= l)."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def learning_rate_scale(rows: int, columns: int, adjust: str) -> float:
    """The factor of a matrix's learning rate.

    Args:
        rows: of the matrix as stored: its outputs, unless it is transposed.
        columns: of the matrix as stored.
        adjust: ``original`` (Keller Jordan): ``sqrt(max(1, rows / columns))``; ``match_rms_adamw``
            (Moonlight, arXiv 2502.16982): ``0.2 sqrt(max(rows, columns))``, with which entries move about as
            far as with AdamW, so that both may have one rate.
    """
    if adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
