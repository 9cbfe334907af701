"""The kernel protocol: attention of a list of tiles on one device, and its capabilities.

Shapes: ``q_BLHD`` [batch, queries, heads, head dim]; ``k_BLKD``, ``v_BLKD`` [batch, keys, K/V
heads, head dim], heads a multiple of K/V heads. The head dim of V, and so of ``out_BLHD``, may be
another than that of q and k. ``lse_BHL`` [batch, heads, queries], natural logarithm, float32
(float64 for float64 inputs), -inf where a query saw no key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.sums import GradientSums
from lightning_cp.layout.tiles import Mask, Tile


@dataclass(frozen=True, eq=False)
class Scores:
    """How scores are made from q and k, in this order (flash-attn's), under ``mask``.

    ``s = softmax_scale * q.k``; with a cap ``s = softcap * tanh(s / softcap)``; with slopes
    ``s -= slope * |i - j + tile.delta|`` for query i and key j of the tile: the global distance.
    """

    softmax_scale: float
    mask: Mask
    softcap: float = 0.0
    """0.0 is none. Feature ``softcap``."""
    alibi_slopes: torch.Tensor | None = None
    """float32 [heads] or [B, heads], of the query heads that are given. Feature ``alibi``."""
    max_logits: bool = False
    """Whether to give ``Accumulator.add`` the row maxima of ``s`` too. Feature ``max_logits``."""

    def of_heads(self, first: int, last: int) -> Scores:
        """The same for the query heads ``first .. last``."""
        if self.alibi_slopes is None:
            return self
        return replace(self, alibi_slopes=self.alibi_slopes[..., first:last].contiguous())


@dataclass(frozen=True)
class Request:
    """The request of a call to a kernel."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    masks: frozenset[str]
    """Mask kinds of the tiles: full, causal, band."""
    needs: frozenset[str] = frozenset()
    """Beyond scale and mask: softcap, alibi, max_logits. Sinks need no kernel."""
    value_dim: int | None = None
    """Head dim of V; ``None``: that of q and k."""

    @property
    def dims(self) -> tuple[int, int]:
        """Head dim of q and k, and of V."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class Capabilities:
    """What a kernel declares that it can do, exactly."""

    device_types: frozenset[str] | None
    """``None``: wherever PyTorch runs."""
    dtypes: frozenset[torch.dtype]
    masks: frozenset[str]
    max_head_dim: int | None = None
    """Of q and k, and of V."""
    head_dim_multiple: int = 1
    one_width: bool = False
    """The operator takes K and V of one head dim: where they differ, the kernel pads what is narrower with
    zeros, computes at the wider head dim, and cuts the results."""
    features: frozenset[str] = frozenset()
    """Of those that ``Request.needs`` may name."""
    obstacle: Callable[[], str | None] | None = None
    """Why it cannot run here whatever is asked (a package or device that is missing); asked last."""
    only_by_name: frozenset[str] = frozenset()
    """Device types on which ``kernel="auto"`` passes it over."""

    def refusal(self, request: Request) -> str | None:
        """Why the request is not covered, or ``None`` if it is."""
        if self.device_types is not None and request.device_type not in self.device_types:
            return f"runs on {listed(self.device_types)}, not {request.device_type}"
        if request.dtype not in self.dtypes:
            return f"takes {listed(map(str, self.dtypes))}, not {request.dtype}"
        for dim in request.dims:
            if self.max_head_dim is not None and dim > self.max_head_dim:
                return f"takes head dims up to {self.max_head_dim}, not {dim}"
            if dim % self.head_dim_multiple:
                return f"takes head dims divisible by {self.head_dim_multiple}, not {dim}"
        if missing := request.masks - self.masks:
            return f"has no {listed(missing)} mask"
        if missing := request.needs - self.features:
            return f"has no {listed(missing)}"
        obstacle = self.obstacle() if self.obstacle is not None else None
        return None if obstacle is None else f"cannot run: {obstacle}"


class QKV(NamedTuple):
    """Queries [B, L, H, D], keys and values [B, S, K, D]; D of the values may be another."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Merged(NamedTuple):
    """What backward knows of the queries: the results of *all* their tiles, and the gradient of out."""

    dout: torch.Tensor
    """[B, L, H, D], D as of the values."""
    out: torch.Tensor
    """Like it, in q's dtype."""
    lse: torch.Tensor
    """[B, H, L]."""


class Kernel(Protocol):
    """Block attention on one device. Implementations never communicate."""

    @property
    def name(self) -> str:
        """The name users select it by."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; a request outside of it is refused before any call."""
        ...

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within each tile and merge the results into ``state``."""
        ...

    def backward(
        self,
        merged: Merged,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add each tile's share to ``gradients``: float32 (float64 for float64 inputs), like ``inputs``."""
        ...


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that outputs, log-sum-exps and gradients are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(str(value) for value in values))
