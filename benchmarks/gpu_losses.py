"""Exchanges of losses in a world of one NCCL rank (gloo on CPU): values and gradients beside plain PyTorch.

The strategy leaves out messages within a group of one rank; here they go over the group of the world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.comm.all_gather import all_gather
from lightning_cp.loss.sequence import PartialSums, SequenceTokens, _SumOverRanks

ROWS, TOKENS, FEATURES = 3, 32, 4
LIMITS = {"float32": 1e-6, "bfloat16": 1e-2}
"""Largest relative differences that rounding may make, by dtype."""
PICKED = (5, -1, 0)


@dataclass(frozen=True)
class LossRow:
    """One exchange in one dtype."""

    exchange: str
    dtype: str
    error: float
    gradient_error: float

    @property
    def failed(self) -> bool:
        """True where a value or a gradient is wrong; NaN is."""
        return not max(self.error, self.gradient_error) <= LIMITS[self.dtype]


LOSS_HEAD = ("exchange", "dtype", "value, off", "gradient, off", "verdict")


def loss_cells(row: LossRow) -> list[object]:
    """Return a line's cells."""
    errors = (f"{row.error:.1e}", f"{row.gradient_error:.1e}")
    return [row.exchange, row.dtype, *errors, "differs" if row.failed else "agrees"]


def loss_rows(device_type: str) -> list[LossRow]:
    """Compare every exchange, in a process group of one rank."""
    rows: list[LossRow] = []
    for dtype in LIMITS:
        torch.manual_seed(3)
        shape = (ROWS, TOKENS, FEATURES)
        x = torch.randn(shape, dtype=getattr(torch, dtype), device=device_type)
        mask = torch.rand(shape[:2], device=device_type) < 0.5
        tokens = SequenceTokens.whole(ROWS, TOKENS, device_type)
        for name, (ours, plain) in _exchanges(tokens, mask).items():
            rows.append(LossRow(name, dtype, *_errors(ours, plain, x)))
    return rows


Function = Callable[[torch.Tensor], torch.Tensor]


def _exchanges(tokens: SequenceTokens, mask: torch.Tensor) -> dict[str, tuple[Function, Function]]:
    """Return each exchange over the world's group, and its answer in plain PyTorch."""
    world: Any = dist.group.WORLD

    def summed(part: PartialSums) -> torch.Tensor:
        return part.finish(_SumOverRanks.apply(part.own, world))  # type: ignore[no-any-return]

    at = torch.arange(ROWS, device=mask.device)
    last = torch.tensor(PICKED, device=mask.device) % TOKENS
    weights = mask[..., None]
    return {
        "sequence_sum": (
            lambda x: summed(tokens.sum(x, mask)),
            lambda x: (x.float() * weights).sum(1).to(x.dtype),
        ),
        "sequence_mean": (
            lambda x: summed(tokens.mean(x, mask)),
            lambda x: ((x.float() * weights).sum(1) / weights.sum(1)).to(x.dtype),
        ),
        "sequence_pick": (lambda x: summed(tokens.pick(x, PICKED)), lambda x: x[at, last]),
        "gather_data": (lambda x: torch.cat(all_gather(x, world)), lambda x: x),
        "all_sum": (lambda x: _SumOverRanks.apply(x, world), lambda x: x),  # type: ignore
    }


def _errors(ours: Function, plain: Function, x: torch.Tensor) -> tuple[float, float]:
    """Return the relative errors of the value and of the gradient of a loss that is not linear."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for function in (ours, plain):
        leaf = x.detach().clone().requires_grad_()
        value = function(leaf)
        value.float().tanh().square().sum().backward()
        assert leaf.grad is not None
        found.append((value.detach(), leaf.grad))
    (value, gradient), (wanted, of_plain) = found
    return _relative(value, wanted), _relative(gradient, of_plain)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())
