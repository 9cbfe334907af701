"""FlashAttention-2 in Triton: the tiles of a hop in one launch forward, and in two backward.

The host side. Triton is imported at the first launch; the device code is in ``triton_forward.py``,
``triton_backward.py`` and what both share, the tables of tiles in ``triton_tiles.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override

from lightning_cp.kernels.call_per_tile import unit_strides
from lightning_cp.kernels.devices import before_ampere
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.protocol import QKV, Capabilities, Merged, Request, Scores
from lightning_cp.kernels.sums import GradientSums
from lightning_cp.kernels.triton_arguments import (
    by_head,
    constants,
    factors,
    grid,
    on_device,
    read,
    unit_stride_totals,
)
from lightning_cp.kernels.triton_launch import Launches, launches
from lightning_cp.kernels.triton_tiles import table
from lightning_cp.layout.tiles import ALL_ROWS, Tile


@dataclass(frozen=True)
class TritonCapabilities(Capabilities):
    """Those of the kernel on a machine that may lack Triton, or have only its interpreter."""

    @override
    def refusal(self, request: Request) -> str | None:
        """Why the request is not covered, or ``None`` if it is."""
        if not is_installed():
            return "needs triton, which is not installed: pip install triton"
        if request.device_type != "cuda" and not (
            request.device_type == "cpu" and is_interpreted()
        ):
            return (
                "runs on cuda (for tests on cpu, in Triton's interpreter: TRITON_INTERPRET=1), "
                f"not {request.device_type}"
            )
        return super().refusal(request)


def is_installed() -> bool:
    """True if there is a Triton to import."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """True if Triton, when it is imported, runs kernels in Python on CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@dataclass(frozen=True)
class TritonFA2:
    """Our FlashAttention-2; deterministic, sums in float32.

    Args:
        blocks: how many tokens a program takes at a time; ``None`` goes by dtype and head dim.
    """

    blocks: Launches | None = None

    @property
    def name(self) -> str:
        """The name users select it by."""
        return "triton"

    @property
    def capabilities(self) -> Capabilities:
        """Every mask and score feature."""
        return TritonCapabilities(
            device_types=frozenset({"cuda", "cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            masks=frozenset({"full", "causal", "band"}),
            max_head_dim=256,
            features=frozenset({"softcap", "alibi", "max_logits"}),
            obstacle=lambda: before_ampere("triton"),
            only_by_name=frozenset({"cpu"}),
        )

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within all tiles in one launch, and merge the result into ``state`` at once."""
        q_BLHD, k_BLKD, v_BLKD = inputs
        launch = self._launches(inputs).forward
        batch, _, heads, _ = q_BLHD.shape
        tiled = table(tiles, scores.mask, batch, "queries", launch.own, q_BLHD.device)
        if tiled is None:
            return
        q, k, v = (by_head(x) for x in unit_strides(q_BLHD, k_BLKD, v_BLKD))
        start, end = tiled.span
        shape = (batch, end - start, heads, v_BLKD.shape[-1])
        make = torch.empty if tiled.is_gapless else torch.zeros
        out = make(shape, dtype=torch.float32, device=q_BLHD.device)
        lse = out.new_full((batch, heads, end - start), -torch.inf)
        top = torch.full_like(lse, -torch.inf) if scores.max_logits else None
        with on_device(q_BLHD.device):
            _device_code().forward[grid(tiled, heads, batch)](
                q,
                k,
                v,
                by_head(out),
                by_head(lse.transpose(1, 2)),
                None if top is None else by_head(top.transpose(1, 2)),
                *read(tiled, scores),
                start,
                *factors(scores),
                HAS_TOP=top is not None,
                BLOCK_Q=launch.own,
                BLOCK_K=launch.step,
                **constants(inputs, tiled, scores, launch),
            )
        state.add(ALL_ROWS, start, out, lse, top)

    def backward(
        self,
        merged: Merged,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add all tiles' gradients: dq in one launch, then dk and dv in one."""
        (dout_BLHD, out_BLHD, lse_BHL), (q_BLHD, k_BLKD, v_BLKD) = merged, inputs
        launch = self._launches(inputs)
        batch, _, heads, _ = q_BLHD.shape
        device, mask = q_BLHD.device, scores.mask
        by_query = table(tiles, mask, batch, "queries", launch.queries.own, device)
        by_key = table(tiles, mask, batch, "keys", launch.keys.own, device)
        if by_query is None or by_key is None:
            return
        dout, q, k, v, out = (
            by_head(x) for x in unit_strides(dout_BLHD, q_BLHD, k_BLKD, v_BLKD, out_BLHD)
        )
        lse = by_head(lse_BHL.transpose(1, 2))
        delta = by_head(torch.empty_like(lse_BHL).transpose(1, 2))
        code, multiply = _device_code(), (scores.softmax_scale, *factors(scores))
        with on_device(device), unit_stride_totals(*gradients.totals) as (dq, dk, dv):
            code.backward_queries[grid(by_query, heads, batch)](
                dout,
                q,
                k,
                v,
                out,
                lse,
                delta,
                by_head(dq),
                *read(by_query, scores),
                *multiply,
                BLOCK_Q=launch.queries.own,
                BLOCK_K=launch.queries.step,
                **constants(inputs, by_query, scores, launch.queries),
            )
            code.backward_keys[grid(by_key, k_BLKD.shape[2], batch)](
                dout,
                q,
                k,
                v,
                lse,
                delta,
                by_head(dk),
                by_head(dv),
                *read(by_key, scores),
                *multiply,
                BLOCK_Q=launch.keys.step,
                BLOCK_K=launch.keys.own,
                **constants(inputs, by_key, scores, launch.keys),
            )

    def _launches(self, inputs: QKV) -> Launches:
        return self.blocks or launches(inputs.q.dtype, max(x.shape[-1] for x in inputs))


def _device_code() -> Any:
    """The three kernels. Importing them imports Triton."""
    from lightning_cp.kernels import triton_backward, triton_forward

    return SimpleNamespace(
        forward=triton_forward.forward,
        backward_queries=triton_backward.backward_queries,
        backward_keys=triton_backward.backward_keys,
    )
