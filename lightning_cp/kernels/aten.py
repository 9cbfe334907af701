"""PyTorch's attention operators: flash on CPU; FlashAttention and cuDNN on CUDA.

Of the CUDA operators only arguments that torch 2.10 has are passed, so that one call serves 2.10 to 2.13: the
schemas of 2.10 and 2.11 are equal, 2.13 appends ``block_table`` and ``num_splits`` to the flash forward, with
defaults. The backward operators read their random state only with dropout, which is 0 here.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from lightning_cp.kernels.devices import head_dim_obstacle, pre_ampere_obstacle, window_obstacle
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.per_tile import (
    Gradients,
    TopLeftKernel,
    is_causal,
    pad_to_widest,
    replace_infinities,
    trim_gradients,
    trim_width,
)
from lightning_cp.kernels.protocol import QKV, Capabilities, Output, Scores, accumulate_dtype
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.kernels.varlen import UNBOUNDED_WINDOW, FlashCall, VarlenKernel
from lightning_cp.layout.tiles import ALL_ROWS, Tile

_HALF_PRECISION = frozenset({torch.bfloat16, torch.float16})
_SINGLE_KEY = ReferenceKernel()


class AtenCpuFlash(TopLeftKernel):
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

    def attend(self, inputs: QKV, tile: Tile, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator; every query of a full or causal tile has a key, so lse is finite."""
        q, k, v = [x.transpose(1, 2) for x in pad_to_widest(*inputs)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal(tile), scale=scores.softmax_scale
        )
        return trim_width(out.transpose(1, 2), inputs.v.shape[-1]), lse

    def differentiate(self, merged: Output, inputs: QKV, tile: Tile, scores: Scores) -> Gradients:
        """Call the operator; ``out`` must have q's dtype, ``lse`` float32 (float64 for float64)."""
        padded = pad_to_widest(merged.dout, merged.out, *inputs)
        dout, out, q, k, v = [x.transpose(1, 2) for x in padded]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            dout, q, k, v, out, merged.lse, 0.0, is_causal(tile), scale=scores.softmax_scale
        )
        parts = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        return trim_gradients(parts, inputs)


class AtenCudaFlash(VarlenKernel):
    """``aten::_flash_attention_forward``, dense and packed, with windows and grouped K/V heads.

    It is FlashAttention-2, or 3 or 4 if ``torch.nn.attention.activate_flash_attention_impl`` has
    activated these. Version 2 returns lse +inf for a query without keys.
    """

    name = "aten_cuda_flash"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        dtypes=_HALF_PRECISION,
        masks=frozenset({"full", "causal", "band"}),
        max_head_dim=256,
        head_dim_multiple=8,
        one_width=True,
        no_dim=head_dim_obstacle,
        no_bands=window_obstacle,
        obstacle=lambda: pre_ampere_obstacle("PyTorch's FlashAttention"),
    )

    @override
    def run_forward(
        self, inputs: QKV, call: FlashCall, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            *inputs,
            *_sizes(call),
            0.0,  # dropout
            call.mask.causal,
            False,  # return_debug_mask
            scale=scores.softmax_scale,
            **_window(call),
        )
        return out, lse

    @override
    def run_backward(
        self, merged: Output, inputs: QKV, call: FlashCall, scores: Scores
    ) -> Gradients:
        """Call the operator."""
        random_state = torch.empty(2, dtype=torch.uint64, device=inputs.q.device)
        return torch.ops.aten._flash_attention_backward.default(
            merged.dout,
            *inputs,
            merged.out,
            merged.lse,
            *_sizes(call),
            0.0,
            call.mask.causal,
            random_state,
            random_state,
            scale=scores.softmax_scale,
            **_window(call),
        )


def _sizes(call: FlashCall) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    """Return cum_seq_q, cum_seq_k, max_q, max_k."""
    cu_q, cu_k = call.cu_seqlens or (None, None)
    return cu_q, cu_k, call.max_q, call.max_k


def _window(call: FlashCall) -> dict[str, int | None]:
    """Return the window's arguments; ``None`` without one, since some implementations have no windows."""
    _, left, right = call.mask
    bounded = (left, right) != (UNBOUNDED_WINDOW, UNBOUNDED_WINDOW)
    return {
        "window_size_left": left if bounded else None,
        "window_size_right": right if bounded else None,
    }


class AtenCudaCudnn(TopLeftKernel):
    """``aten::_scaled_dot_product_cudnn_attention`` on [B, H, L, D]; its lse is [B, H, L, 1].

    cuDNN refuses a single key (a document of which a rank holds one token), so the reference kernel computes
    these tiles. V may have another head dim than K. Its backward is not deterministic. PyTorch makes a plan
    for each combination of sizes and strides, in each thread, and never drops one.
    """

    name = "aten_cuda_cudnn"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        dtypes=_HALF_PRECISION,
        masks=frozenset({"full", "causal"}),
        max_head_dim=128,
        head_dim_multiple=8,
        no_packs="PyTorch makes a cuDNN plan for each length of a tile, and never frees it",
        obstacle=lambda: pre_ampere_obstacle("cuDNN's attention"),
    )

    @override
    def attend(self, inputs: QKV, tile: Tile, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator on transposed views."""
        if tile.k_len == 1:
            state = Accumulator(inputs.q, accumulate_dtype(inputs.q.dtype), inputs.v.shape[-1])
            _SINGLE_KEY.forward(inputs, [_whole(tile)], scores, state)
            return state.result(state.dtype)
        q, k, v = (x.transpose(1, 2) for x in inputs)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q,
            k,
            v,
            None,  # bias
            True,  # compute_log_sumexp
            0.0,  # dropout
            is_causal(tile),
            False,  # return_debug_mask
            scale=scores.softmax_scale,
        )
        return out.transpose(1, 2), replace_infinities(lse.squeeze(-1), -torch.inf)

    @override
    def differentiate(self, merged: Output, inputs: QKV, tile: Tile, scores: Scores) -> Gradients:
        """Call the operator on transposed views."""
        if tile.k_len == 1:
            dtype = accumulate_dtype(inputs.q.dtype)
            sums = GradientSums.of(*(torch.zeros_like(x, dtype=dtype) for x in inputs))
            _SINGLE_KEY.backward(merged, inputs, [_whole(tile)], scores, sums)
            return sums.totals
        q, k, v = (x.transpose(1, 2) for x in inputs)
        random_state = torch.empty((), dtype=torch.int64, device=q.device)
        op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        dq, dk, dv = op(
            merged.dout.transpose(1, 2),
            q,
            k,
            v,
            merged.out.transpose(1, 2),
            merged.lse.unsqueeze(-1).contiguous(),
            random_state,
            random_state,
            None,  # bias
            None,  # cu_seqlens of queries and keys: dense
            None,
            tile.q_len,
            tile.k_len,
            0.0,
            is_causal(tile),
            scale=scores.softmax_scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _whole(tile: Tile) -> Tile:
    """Return a tile with one key in the coordinates of its own slices."""
    return tile._replace(row=ALL_ROWS, q_start=0, k_start=0, mask="full")
