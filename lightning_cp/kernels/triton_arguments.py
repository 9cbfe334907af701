"""What a launch of the Triton kernels is given: tensors with their strides, tables, constants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from lightning_cp.kernels.protocol import QKV, Scores
from lightning_cp.kernels.triton_launch import Launch
from lightning_cp.kernels.triton_tiles import Table


@contextmanager
def unit_stride_totals(*totals: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors to add to: the totals, or zeros that are added to them at the end."""
    parts = tuple(x if x.stride(-1) == 1 else x.new_zeros(x.shape) for x in totals)
    yield parts
    for total, part in zip(totals, parts, strict=True):
        if part is not total:
            total += part


class Heads(NamedTuple):
    """A tensor and its strides as device code takes it: ``x.at``, ``x.batch`` ..; D has stride 1."""

    at: torch.Tensor
    batch: int
    token: int
    head: int


def by_head(x: torch.Tensor) -> Heads:
    """Of [B, L, H, D] with unit stride along D, or of [B, L, H]."""
    # Within a block of at most 128 tokens device code counts in 32 bits.
    assert x.stride(1) < 1 << 24, f"tokens {x.stride(1)} entries apart"
    return Heads(x, x.stride(0), x.stride(1), x.stride(2))


def grid(tiled: Table, heads: int, batch: int) -> tuple[int, int, int]:
    """Programs: blocks, heads, and batch rows unless the blocks are of single rows."""
    return tiled.blocks.shape[0], heads, 1 if tiled.is_per_row else batch


def read(tiled: Table, scores: Scores) -> tuple[Any, ...]:
    """Slopes and tables."""
    return by_row(scores.alibi_slopes), tiled.tiles, tiled.blocks, tiled.refs


def by_row(slopes: torch.Tensor | None) -> Heads | None:
    """Of float32 [H] or [B, H]."""
    if slopes is None:
        return None
    return Heads(slopes, slopes.stride(0) if slopes.dim() == 2 else 0, 0, slopes.stride(-1))


def factors(scores: Scores) -> tuple[float, float]:
    """What multiplies q.k, and what the capped result: scores in units of log2, for ``exp2``."""
    if scores.softcap:
        return scores.softmax_scale / scores.softcap, scores.softcap / math.log(2)
    return scores.softmax_scale / math.log(2), 1.0


def constants(inputs: QKV, tiled: Table, scores: Scores, launch: Launch) -> dict[str, Any]:
    """What the compiler is told."""
    head_dim, value_dim = inputs.q.shape[-1], inputs.v.shape[-1]
    return {
        "GROUP": inputs.q.shape[2] // inputs.k.shape[2],
        "IS_PER_ROW": tiled.is_per_row,
        "HAS_CAP": bool(scores.softcap),
        "HAS_SLOPES": scores.alibi_slopes is not None,
        "D": head_dim,
        "BLOCK_D": _block(head_dim),
        "DV": value_dim,
        "BLOCK_DV": _block(value_dim),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def _block(head_dim: int) -> int:
    """The power of two that a head dim is padded to; tensor cores multiply at least 16 entries."""
    return max(16, 1 << (head_dim - 1).bit_length())


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
