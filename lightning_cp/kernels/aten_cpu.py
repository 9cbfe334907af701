"""PyTorch's CPU flash operator, which ``F.scaled_dot_product_attention`` calls on CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_cp.kernels.per_tile import (
    Gradients,
    PerTileKernel,
    is_causal,
    pad_to_widest,
    split_causal,
    trim_gradients,
    trim_width,
)
from lightning_cp.kernels.protocol import QKV, Capabilities, Merged, Scores
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import Tile


class AtenCpuFlash(PerTileKernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``.

    It takes tensors as [B, H, L, D] of any strides along B, H and L, so that transposed views cost
    nothing, and supports grouped K/V heads. An empty tile would kill the process.
    """

    name = "aten_cpu_flash"
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        masks=frozenset({"full", "causal"}),
        one_width=True,
    )

    def calls(self, tiles: Sequence[Tile], mask: Mask) -> list[Tile]:
        """Return tiles whose diagonal is at the top left, as the operator's is."""
        return split_causal(tiles)

    def attend(self, inputs: QKV, tile: Tile, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator; every query of a full or causal tile has a key, so lse is finite."""
        q, k, v = [x.transpose(1, 2) for x in pad_to_widest(*inputs)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal(tile), scale=scores.softmax_scale
        )
        return trim_width(out.transpose(1, 2), inputs.v.shape[-1]), lse

    def differentiate(self, merged: Merged, inputs: QKV, tile: Tile, scores: Scores) -> Gradients:
        """Call the operator; ``out`` must have q's dtype, ``lse`` float32 (float64 for float64)."""
        padded = pad_to_widest(merged.dout, merged.out, *inputs)
        dout, out, q, k, v = [x.transpose(1, 2) for x in padded]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            dout, q, k, v, out, merged.lse, 0.0, is_causal(tile), scale=scores.softmax_scale
        )
        parts = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        return trim_gradients(parts, inputs)
