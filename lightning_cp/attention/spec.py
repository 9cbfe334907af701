"""``AttentionSpec``: mask and score semantics of an attention call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import torch

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Mask
from lightning_cp.utils.tensors import to_list


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """Mask and score semantics of one attention call; names and conventions are flash-attn's.

    Args:
        causal: a query sees no later key.
        softmax_scale: factor on q.k; ``None`` is ``head_dim ** -0.5``.
        window: (left, right) distances still visible; -1 is unbounded.
        softcap: cap of the scores, ``softcap * tanh(score / softcap)``; 0.0 is off.
        alibi_slopes: float32 [H] or [B, H], a bias ``-slope * |distance|`` after the cap; no gradient.
        sinks: [H], one logit per query head that takes part in the softmax only; differentiable. Each
            rank's gradient is its share, as for any replicated parameter.
        dropout_p: must be 0.0: ranks cannot draw the mask of the unsharded call.

    Raises:
        ConfigError: a value that no mode supports.
    """

    causal: bool = True
    softmax_scale: float | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        if self.dropout_p != 0.0:
            raise ConfigError(
                f"attention dropout must be 0.0 under context parallelism, got {self.dropout_p}: the "
                "ranks cannot draw the mask that one process would. Set the model's attention dropout "
                "to 0.0 (dropout elsewhere in the model is fine)."
            )
        if type(self.causal) is not bool:
            raise ConfigError(
                f"causal must be True or False, got {self.causal!r}. "
                "For other masks use window or documents."
            )
        for name in ("softmax_scale", "softcap"):
            if isinstance(value := getattr(self, name), torch.Tensor):
                object.__setattr__(self, name, _plain(value))
        scale = self.softmax_scale
        if scale is not None and (not _is_number(scale) or scale == 0):
            raise ConfigError(
                f"softmax_scale must be a finite number and not 0, or None, got {scale!r}{_detached(scale)}. "
                "None scales by head_dim ** -0.5."
            )
        if not _is_number(self.softcap) or self.softcap < 0:
            raise ConfigError(
                f"softcap must be 0.0 (off) or positive, got {self.softcap!r}{_detached(self.softcap)}. "
                "Leave it out to cap no scores."
            )
        for name in ("alibi_slopes", "sinks"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"{name} must be a tensor or None, got {type(value).__name__}: torch.tensor(...) makes "
                    "one."
                )
        if self.alibi_slopes is not None and self.alibi_slopes.requires_grad:
            raise ConfigError(
                "alibi_slopes with requires_grad=True cannot be used: no gradient flows to them. Pass "
                "alibi_slopes.detach(), or a buffer."
            )
        _ = self.mask  # validates the window

    @cached_property
    def mask(self) -> Mask:
        """Causality and window, for the schedule."""
        return Mask(self.causal, self.window, uses_distance=self.alibi_slopes is not None)

    @cached_property
    def kind(self) -> str:
        """The values of a call, for ranks to compare; of tensors, their presence."""
        has = (self.alibi_slopes is not None, self.sinks is not None)
        return (
            f"causal={self.causal}, window={self.window}, softmax_scale={self.softmax_scale}, "
            f"softcap={self.softcap}, ALiBi={has[0]}, sinks={has[1]}"
        )

    @cached_property
    def needs(self) -> frozenset[str]:
        """Score features that a kernel must declare; sinks are added to the results of any kernel."""
        features = {"softcap": self.softcap != 0.0, "alibi": self.alibi_slopes is not None}
        return frozenset([name for name, is_set in features.items() if is_set])

    def check_slopes(self, q_BLHD: torch.Tensor) -> None:
        """Check that the slopes fit the queries.

        Raises:
            ShapeError: shapes that do not fit; or slopes that are not finite (checked on CPU, where it is
                cheap).
        """
        slopes = self.alibi_slopes
        if slopes is None:
            return
        batch, _, heads, _ = q_BLHD.shape
        fits = tuple(slopes.shape) in ((heads,), (batch, heads))
        if not fits or slopes.dtype != torch.float32 or slopes.device != q_BLHD.device:
            raise ShapeError(
                f"alibi_slopes must be float32, [{heads}] or [{batch}, {heads}], on {q_BLHD.device} for q "
                f"{tuple(q_BLHD.shape)}, got {tuple(slopes.shape)} {slopes.dtype} on {slopes.device}. "
                "Convert them with alibi_slopes.to(q.device, torch.float32), and give one for each head."
            )
        if slopes.device.type == "cpu" and not bool(slopes.isfinite().all()):
            raise ShapeError(
                f"alibi_slopes must be finite, got {to_list(slopes)}. "
                "Use 0 for a head without a bias."
            )

    def scale(self, head_dim: int) -> float:
        """Return the factor on q.k."""
        return head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)


def _plain(value: torch.Tensor) -> object:
    """Convert a tensor of one number to it; one that requires a gradient stays a tensor, and is refused."""
    return value.item() if value.numel() == 1 and not value.requires_grad else value


def _is_number(value: object) -> bool:
    """Return True for a finite number that fits a float."""
    try:
        return (
            not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(float(value))
        )
    except OverflowError:
        return False


def _detached(value: object) -> str:
    """Return advice for a tensor that requires a gradient, else an empty text."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return ""
    return ", to which no gradient would flow: pass float(...), or multiply q by it"
