"""The CPU flash operator, which ``F.scaled_dot_product_attention`` calls on CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lightning_cp.kernels.call_per_tile import (
    CallPerTile,
    Gradients,
    cut,
    cut_gradients,
    is_causal,
    one_width,
    square_causal,
)
from lightning_cp.kernels.protocol import QKV, Capabilities, Merged, Scores
from lightning_cp.layout.tiles import Mask, Tile


class AtenCpuFlash(CallPerTile):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``.

    It takes tensors as [B, H, L, D] of any strides along B, H and L, so that transposed views cost
    nothing, and shares K/V heads among query heads by itself. An empty tile would kill the process.
    """

    name = "aten_cpu_flash"
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        masks=frozenset({"full", "causal"}),
        one_width=True,
    )

    def calls(self, tiles: Sequence[Tile], mask: Mask) -> Iterable[Tile]:
        """Tiles whose diagonal is at the top left, where the operator has it."""
        for tile in super().calls(tiles, mask):
            yield from square_causal(tile)

    def attend(self, inputs: QKV, tile: Tile, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """One call; every query of a full or causal tile has a key, so lse is finite."""
        q, k, v = (x.transpose(1, 2) for x in one_width(*inputs))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal(tile), scale=scores.softmax_scale
        )
        return cut(out.transpose(1, 2), inputs.v.shape[-1]), lse

    def differentiate(self, merged: Merged, inputs: QKV, tile: Tile, scores: Scores) -> Gradients:
        """One call; ``out`` must have q's dtype, ``lse`` float32 (float64 for float64)."""
        dout, out, q, k, v = (
            x.transpose(1, 2) for x in one_width(merged.dout, merged.out, *inputs)
        )
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            dout, q, k, v, out, merged.lse, 0.0, is_causal(tile), scale=scores.softmax_scale
        )
        parts = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        return cut_gradients(parts, inputs)
