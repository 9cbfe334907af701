"""The kernel protocol: attention of a list of tiles on one device, and its capabilities.

Shapes: ``q_BLHD`` [batch, queries, heads, head dim]; ``k_BLKD``, ``v_BLKD`` [batch, keys, K/V
heads, head dim], heads a multiple of K/V heads. The head dim of V, and so of ``out_BLHD``, may be
another than that of q and k. ``lse_BHL`` [batch, heads, queries], natural logarithm, float32
(float64 for float64 inputs), -inf for a query without keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import Tile


@dataclass(frozen=True, eq=False)
class Scores:
    """Computation of scores from q and k, in flash-attn's order, under ``mask``.

    ``s = softmax_scale * q.k``; with a cap ``s = softcap * tanh(s / softcap)``; with slopes
    ``s -= slope * |i - j + tile.delta|`` for query i and key j of the tile: the global distance.
    """

    softmax_scale: float
    mask: Mask
    softcap: float = 0.0
    """0.0: no cap. Feature ``softcap``."""
    alibi_slopes: torch.Tensor | None = None
    """float32 [heads] or [B, heads], of the given query heads. Feature ``alibi``."""
    max_logits: bool = False
    """Also pass the row maxima of ``s`` to ``Accumulator.add``. Feature ``max_logits``."""

    def of_heads(self, first: int, last: int) -> Scores:
        """Return the scores of the query heads ``first .. last``."""
        if self.alibi_slopes is None:
            return self
        return replace(self, alibi_slopes=self.alibi_slopes[..., first:last].contiguous())


@dataclass(frozen=True)
class Request:
    """Requirements of an attention call on a kernel."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    masks: frozenset[str]
    """Mask kinds of the tiles: full, causal, band."""
    needs: frozenset[str] = frozenset()
    """Features beyond scale and mask: softcap, alibi, max_logits. Sinks need none."""
    value_dim: int | None = None
    """Head dim of V; ``None``: that of q and k."""
    packed: bool = False
    """Rows hold several documents, or padding: tiles have any lengths, and other ones in each batch."""

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims: of q and k, and of V."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim


_WORDS = {"full": "full", "causal": "causal", "band": "window"}
"""Mask kinds in messages."""


@dataclass(frozen=True)
class Capabilities:
    """Exact capabilities that a kernel declares."""

    device_types: frozenset[str] | None
    """``None``: every device of PyTorch."""
    dtypes: frozenset[torch.dtype]
    masks: frozenset[str]
    max_head_dim: int | None = None
    """Largest head dim of q and k, and of V."""
    head_dim_multiple: int = 1
    one_width: bool = False
    """The operator needs one head dim for K and V: if they differ, the kernel pads the narrower with zeros,
    computes at the wider head dim, and trims the results."""
    features: frozenset[str] = frozenset()
    """Features, as in ``Request.needs``."""
    no_packs: str = ""
    """Reason why it is not for packed rows; empty if it is."""
    no_dim: Callable[[int], str | None] | None = None
    """Returns the reason if a head dim within these limits cannot be used here."""
    no_bands: Callable[[], str | None] | None = None
    """Returns the reason if its band masks cannot be used here."""
    obstacle: Callable[[], str | None] | None = None
    """Returns the reason if it cannot run here at all (a missing package or device); called last."""
    only_by_name: frozenset[str] = frozenset()
    """Device types on which ``kernel="auto"`` skips it."""

    def refusal(self, request: Request) -> str | None:
        """Return the reason why the request is not covered, or ``None`` if it is."""
        if self.device_types is not None and request.device_type not in self.device_types:
            return f"runs on {join_sorted(self.device_types)}, not {request.device_type}"
        if request.dtype not in self.dtypes:
            return f"takes {join_sorted(map(str, self.dtypes))}, not {request.dtype}"
        for dim in request.dims:
            if self.max_head_dim is not None and dim > self.max_head_dim:
                return f"takes head dims up to {self.max_head_dim}, not {dim}"
            if dim % self.head_dim_multiple:
                return f"takes head dims divisible by {self.head_dim_multiple}, not {dim}"
            if self.no_dim is not None and (reason := self.no_dim(dim)):
                return f"takes no head dim {dim}: {reason}"
        if missing := request.masks - self.masks:
            return f"has no {join_sorted(_WORDS[mask] for mask in missing)} mask"
        if "band" in request.masks and self.no_bands is not None and (reason := self.no_bands()):
            return f"has no window mask: {reason}"
        if missing := request.needs - self.features:
            return f"has no {join_sorted(missing)}"
        if request.packed and self.no_packs:
            return f"is not for packed documents and padded rows: {self.no_packs}"
        obstacle = self.obstacle() if self.obstacle is not None else None
        return None if obstacle is None else f"cannot run: {obstacle}"


class QKV(NamedTuple):
    """Queries [B, L, H, D], keys and values [B, S, K, D]; values may have another D."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Output(NamedTuple):
    """Results of the queries over *all* their tiles, and the gradient of out: the inputs of backward."""

    dout: torch.Tensor
    """[B, L, H, D], with D of the values."""
    out: torch.Tensor
    """[B, L, H, D], in q's dtype."""
    lse: torch.Tensor
    """[B, H, L]."""


class Kernel(Protocol):
    """Block attention on one device. Implementations never communicate."""

    @property
    def name(self) -> str:
        """Name by which users select the kernel."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities; requests beyond them are refused before any call."""
        ...

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within each tile and merge the results into ``state``."""
        ...

    def backward(
        self,
        merged: Output,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add each tile's share to ``gradients``: float32 (float64 for float64 inputs), like ``inputs``."""
        ...


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype of outputs, log-sum-exps and gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def join_sorted(values: Iterable[object]) -> str:
    """Return the sorted values as text: ``a, b, c``."""
    return ", ".join(sorted(str(value) for value in values))
