"""Host code of FlashAttention-2 in Triton: a hop's tiles in one launch forward, in two backward.

Triton is imported at the first launch. The device code is in ``forward.py``, ``backward.py`` and
``scores.py``, the tables of tiles in ``tiles.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from lightning_cp.kernels.devices import pre_ampere_obstacle
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.per_tile import with_unit_strides
from lightning_cp.kernels.protocol import QKV, Capabilities, Merged, Request, Scores
from lightning_cp.kernels.triton.tiles import Table, make_table
from lightning_cp.layout.tiles import ALL_ROWS, Tile


class BlockConfig(NamedTuple):
    """Block sizes of one kernel; powers of two, at least 16.

    Attributes:
        own: tokens that a program owns.
        step: tokens of the other side per iteration.
        warps: groups of 32 threads per program.
        stages: iterations in flight.
    """

    own: int
    step: int
    warps: int = 4
    stages: int = 2


class BlockConfigs(NamedTuple):
    """Block sizes of the three kernels."""

    forward: BlockConfig
    queries: BlockConfig
    keys: BlockConfig


# Chosen from the compiler's reports for sm_80: shared memory within the 99 KiB of the smaller GPUs since
# Ampere, few registers spilled. Not tuned by time. float32 has no tensor cores here, and large blocks of it
# spill by kilobytes and compile for minutes.
_HALF = {
    32: BlockConfigs(
        BlockConfig(128, 64, 4, 3), BlockConfig(128, 64, 4, 3), BlockConfig(128, 64, 4, 2)
    ),
    64: BlockConfigs(
        BlockConfig(128, 64, 4, 3), BlockConfig(128, 64, 8, 2), BlockConfig(128, 64, 8, 2)
    ),
    128: BlockConfigs(
        BlockConfig(128, 64, 8, 2), BlockConfig(64, 64, 4, 2), BlockConfig(64, 64, 8, 2)
    ),
    256: BlockConfigs(
        BlockConfig(64, 32, 4, 2), BlockConfig(64, 32, 8, 1), BlockConfig(32, 32, 8, 1)
    ),
}
_SINGLE = {
    32: BlockConfigs(
        BlockConfig(64, 32, 4, 1), BlockConfig(64, 32, 4, 1), BlockConfig(32, 32, 4, 1)
    ),
    64: BlockConfigs(
        BlockConfig(32, 32, 4, 1), BlockConfig(32, 32, 8, 1), BlockConfig(32, 32, 8, 1)
    ),
    128: BlockConfigs(
        BlockConfig(32, 32, 8, 1), BlockConfig(32, 32, 8, 1), BlockConfig(32, 32, 8, 1)
    ),
    256: BlockConfigs(
        BlockConfig(16, 16, 8, 1), BlockConfig(16, 16, 8, 1), BlockConfig(16, 16, 8, 1)
    ),
}


def block_configs(dtype: torch.dtype, head_dim: int) -> BlockConfigs:
    """Return the block sizes for a dtype and the wider head dim of K and V."""
    sizes = _SINGLE if dtype == torch.float32 else _HALF
    return next(sizes[size] for size in sorted(sizes) if head_dim <= size)


# Arguments of a launch: tensors with their strides, tables, constants.


@contextmanager
def unit_stride_totals(*totals: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tensors with unit stride to add to: the totals, or zeros that are added to them at the end."""
    parts = tuple(x if x.stride(-1) == 1 else x.new_zeros(x.shape) for x in totals)
    yield parts
    for total, part in zip(totals, parts, strict=True):
        if part is not total:
            total += part


class StridedTensor(NamedTuple):
    """A tensor and its strides for device code: ``x.at``, ``x.batch``, ...; D has stride 1."""

    at: torch.Tensor
    batch: int
    token: int
    head: int


def by_head(x: torch.Tensor) -> StridedTensor:
    """Make it for [B, L, H, D] with unit stride along D, or for [B, L, H]."""
    # Within a block of at most 128 tokens device code counts in 32 bits.
    assert x.stride(1) < 1 << 24, f"tokens {x.stride(1)} entries apart"
    return StridedTensor(x, x.stride(0), x.stride(1), x.stride(2))


def grid(tiled: Table, heads: int, batch: int) -> tuple[int, int, int]:
    """Return the programs: blocks, heads, and batch rows unless blocks name their row."""
    return tiled.blocks.shape[0], heads, 1 if tiled.is_per_row else batch


def launch_tables(tiled: Table, scores: Scores) -> tuple[Any, ...]:
    """Return slopes and tables."""
    return by_row(scores.alibi_slopes), tiled.tiles, tiled.blocks, tiled.refs


def by_row(slopes: torch.Tensor | None) -> StridedTensor | None:
    """Make it for float32 [H] or [B, H]."""
    if slopes is None:
        return None
    return StridedTensor(slopes, slopes.stride(0) if slopes.dim() == 2 else 0, 0, slopes.stride(-1))


def score_factors(scores: Scores) -> tuple[float, float]:
    """Return the factors of q.k and of the capped result; scores are in units of log2, for ``exp2``."""
    if scores.softcap:
        return scores.softmax_scale / scores.softcap, scores.softcap / math.log(2)
    return scores.softmax_scale / math.log(2), 1.0


def compile_constants(
    inputs: QKV, tiled: Table, scores: Scores, launch: BlockConfig
) -> dict[str, Any]:
    """Return the compile-time constants."""
    head_dim, value_dim = inputs.q.shape[-1], inputs.v.shape[-1]
    return {
        "GROUP": inputs.q.shape[2] // inputs.k.shape[2],
        "IS_PER_ROW": tiled.is_per_row,
        "HAS_CAP": bool(scores.softcap),
        "HAS_SLOPES": scores.alibi_slopes is not None,
        "D": head_dim,
        "BLOCK_D": _padded_dim(head_dim),
        "DV": value_dim,
        "BLOCK_DV": _padded_dim(value_dim),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def _padded_dim(head_dim: int) -> int:
    """Return the power of two to which a head dim is padded; tensor cores multiply at least 16 entries."""
    return max(16, 1 << (head_dim - 1).bit_length())


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Set the current device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class TritonCapabilities(Capabilities):
    """Capabilities on a machine that may lack Triton, or have only its interpreter."""

    @override
    def refusal(self, request: Request) -> str | None:
        """Return the reason why the request is not covered, or ``None`` if it is."""
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
    """Return True if Triton is installed."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return True if Triton interprets kernels in Python on CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@dataclass(frozen=True)
class TritonFA2:
    """FlashAttention-2 in Triton; deterministic, sums in float32.

    Args:
        blocks: block sizes; ``None`` chooses them by dtype and head dim.
    """

    blocks: BlockConfigs | None = None

    @property
    def name(self) -> str:
        """Name by which users select the kernel."""
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
            obstacle=lambda: pre_ampere_obstacle("triton"),
            only_by_name=frozenset({"cpu"}),
        )

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within all tiles in one launch, and merge the result into ``state`` at once."""
        q_BLHD, k_BLKD, v_BLKD = inputs
        launch = self._launches(inputs).forward
        batch, _, heads, _ = q_BLHD.shape
        tiled = make_table(tiles, scores.mask, batch, "queries", launch.own, q_BLHD.device)
        if tiled is None:
            return
        q, k, v = (by_head(x) for x in with_unit_strides(q_BLHD, k_BLKD, v_BLKD))
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
                *launch_tables(tiled, scores),
                start,
                *score_factors(scores),
                HAS_TOP=top is not None,
                BLOCK_Q=launch.own,
                BLOCK_K=launch.step,
                **compile_constants(inputs, tiled, scores, launch),
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
        by_query = make_table(tiles, mask, batch, "queries", launch.queries.own, device)
        by_key = make_table(tiles, mask, batch, "keys", launch.keys.own, device)
        if by_query is None or by_key is None:
            return
        dout, q, k, v, out = (
            by_head(x) for x in with_unit_strides(dout_BLHD, q_BLHD, k_BLKD, v_BLKD, out_BLHD)
        )
        lse = by_head(lse_BHL.transpose(1, 2))
        delta = by_head(torch.empty_like(lse_BHL).transpose(1, 2))
        code, multiply = _device_code(), (scores.softmax_scale, *score_factors(scores))
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
                *launch_tables(by_query, scores),
                *multiply,
                BLOCK_Q=launch.queries.own,
                BLOCK_K=launch.queries.step,
                **compile_constants(inputs, by_query, scores, launch.queries),
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
                *launch_tables(by_key, scores),
                *multiply,
                BLOCK_Q=launch.keys.step,
                BLOCK_K=launch.keys.own,
                **compile_constants(inputs, by_key, scores, launch.keys),
            )

    def _launches(self, inputs: QKV) -> BlockConfigs:
        return self.blocks or block_configs(inputs.q.dtype, max(x.shape[-1] for x in inputs))


def _device_code() -> Any:
    """Import the three kernels, and Triton with them."""
    from lightning_cp.kernels.triton import backward as triton_backward
    from lightning_cp.kernels.triton import forward as triton_forward

    return SimpleNamespace(
        forward=triton_forward.forward,
        backward_queries=triton_backward.backward_queries,
        backward_keys=triton_backward.backward_keys,
    )
