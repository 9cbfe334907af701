"""Losses can be held against each other only at the same steps, after the same tokens."""

from __future__ import annotations

from lightning_cp.compare.runs import Curve, Run
from lightning_cp.errors import ConfigError


def require_same_steps(run: Run, other: Run, loss: str, *, called: str, why: str) -> None:
    """Refuse two curves of which one says nothing about the other.

    Args:
        run: one of the two.
        other: the other one.
        loss: whose curves.
        called: what the other one is to the first, as in "its baseline one".
        why: what follows from other batches, and what would work.

    Raises:
        ConfigError: they have it at different steps, or after different tokens.
    """
    ours, theirs = run.curves[loss], other.curves[loss]
    if ours.steps != theirs.steps:
        raise ConfigError(
            f"{run.name} and {called} have {loss} at different steps: {_span(ours)}, and {_span(theirs)}. "
            "Compare runs of the same length that have come to their end."
        )
    for step, mine, its in zip(ours.steps, ours.tokens, theirs.tokens, strict=True):
        if mine != its:
            raise ConfigError(
                f"{run.name} had trained on {mine:.0f} tokens at step {step}, {called} on {its:.0f}: {why}"
            )


def _span(curve: Curve) -> str:
    return f"{len(curve.steps)} from {curve.steps[0]} to {curve.steps[-1]}"
