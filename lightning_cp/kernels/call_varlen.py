"""FlashAttention's operators, whoever offers them: one call per long tile, one per pack of short ones.

An operator takes dense tensors [B, L, H, D], or packed ones [T, H, D] with the places where each
sequence begins (``cu_seqlens``); its masks are aligned at the bottom right. A packed document, or a
row of a batch, is a sequence; see :mod:`lightning_cp.kernels.packs` for which tiles are packed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from lightning_cp.kernels.call_per_tile import (
    CallPerTile,
    Gradients,
    cut,
    cut_gradients,
    is_causal,
    one_width,
    replace_infinities,
    unit_strides,
)
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.packs import (
    DEFAULT_RULE,
    FlashMask,
    Pack,
    PackRule,
    flash_mask,
    in_flash_terms,
    pack_tiles,
)
from lightning_cp.kernels.protocol import QKV, Merged, Scores
from lightning_cp.kernels.sums import GradientSums
from lightning_cp.layout.tiles import Mask, Tile


@dataclass(frozen=True, eq=False)
class FlashCall:
    """One call of the operator: its mask, longest sequences and, if packed, where sequences begin."""

    mask: FlashMask
    max_q: int
    max_k: int
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None
    """int32 [sequences + 1] of the queries and of the keys; ``None``: dense."""


class CallVarlen(CallPerTile):
    """A kernel around an operator of FlashAttention; subclasses adapt the operator."""

    def __init__(self, rule: PackRule = DEFAULT_RULE) -> None:
        self._rule = rule

    @abstractmethod
    def run_forward(
        self, inputs: QKV, call: FlashCall, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` like q and ``lse`` [B, H, i], or [H, T] packed; infinite without a key.

        q, k and v have one head dim.
        """

    @abstractmethod
    def run_backward(
        self, merged: Merged, inputs: QKV, call: FlashCall, scores: Scores
    ) -> Gradients:
        """The gradients; ``merged.lse`` is dense memory, which is all that operators read.

        All tensors have one head dim.
        """

    @override
    def calls(self, tiles: Sequence[Tile], mask: Mask) -> Iterable[Tile]:
        """Tiles whose window the operator can express."""
        return in_flash_terms(tiles, mask)

    @override
    def attend(self, inputs: QKV, tile: Tile, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """One dense call on slices of any strides but the last."""
        return self._forward(inputs, _dense_call(tile, scores.mask), scores)

    @override
    def differentiate(self, merged: Merged, inputs: QKV, tile: Tile, scores: Scores) -> Gradients:
        """One dense call; ``lse`` is read as dense memory whatever its strides, so it is copied."""
        merged = merged._replace(lse=merged.lse.contiguous())
        return self._backward(merged, inputs, _dense_call(tile, scores.mask), scores)

    def _forward(
        self, inputs: QKV, call: FlashCall, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One call with tensors of any head dims; lse is -inf without a key."""
        out, lse = self.run_forward(QKV(*one_width(*inputs)), call, scores)
        return cut(out, inputs.v.shape[-1]), replace_infinities(lse, -torch.inf)

    def _backward(self, merged: Merged, inputs: QKV, call: FlashCall, scores: Scores) -> Gradients:
        """One call with tensors of any head dims."""
        dout, out, *wide = one_width(merged.dout, merged.out, *inputs)
        merged = merged._replace(dout=dout, out=out)
        return cut_gradients(self.run_backward(merged, QKV(*wide), call, scores), inputs)

    @override
    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within each tile and merge the results into ``state``."""
        device = inputs.q.device
        alone, packs = self._pack(tiles, scores.mask, inputs.q.shape[0])
        super().forward(inputs, alone, scores, state)
        inputs = QKV(*unit_strides(*inputs))
        for pack in packs:
            call = _packed_call(pack, device)
            out_THD, lse_HT = self._forward(_taken(pack, inputs), call, scores)
            if pack.q.run is None:
                state.add_at(*pack.q.index(device), out_THD, lse_HT)
            else:
                state.add(*pack.q.run, out_THD.unsqueeze(0), lse_HT.unsqueeze(0))

    @override
    def backward(
        self,
        merged: Merged,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add each tile's share to ``gradients``."""
        alone, packs = self._pack(tiles, scores.mask, inputs.q.shape[0])
        if alone:
            super().backward(merged, inputs, alone, scores, gradients)
        inputs, results = QKV(*unit_strides(*inputs)), unit_strides(merged.dout, merged.out)
        for pack in packs:
            dout_THD, out_THD = (pack.q.take(x) for x in results)
            lse_HT = replace_infinities(pack.q.take(merged.lse.transpose(1, 2)).T, torch.inf)
            known = Merged(dout_THD, out_THD, lse_HT.contiguous())
            call = _packed_call(pack, inputs.q.device)
            parts = self._backward(known, _taken(pack, inputs), call, scores)
            for spans, gradient, part in zip(
                (pack.q, pack.k, pack.k), gradients, parts, strict=True
            ):
                spans.add(gradient.total, part)

    def _pack(
        self, tiles: Sequence[Tile], mask: Mask, batch: int
    ) -> tuple[Sequence[Tile], Sequence[Pack]]:
        """The tiles to call one by one, and packs of the others; none where there are few tiles."""
        if len(tiles) < self._rule.fewest:
            return tiles, ()
        return pack_tiles(tiles, mask, batch, self._rule)


def _dense_call(tile: Tile, mask: Mask) -> FlashCall:
    is_causal(tile)  # asserts that it is square: operators other than FlashAttention's align it so
    return FlashCall(flash_mask(tile, mask), tile.q_len, tile.k_len)


def _packed_call(pack: Pack, device: torch.device) -> FlashCall:
    cu_seqlens = pack.q.cu_seqlens(device), pack.k.cu_seqlens(device)
    return FlashCall(pack.mask, pack.q.longest, pack.k.longest, cu_seqlens)


def _taken(pack: Pack, inputs: QKV) -> QKV:
    return QKV(pack.q.take(inputs.q), pack.k.take(inputs.k), pack.k.take(inputs.v))
