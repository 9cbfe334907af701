"""The calls that the ring-flash-attention package makes on one rank of its zigzag ring, without the package.

Which slices its kernel is called on, in which order, and what is done with the results, after version 0.1.8
(``zigzag_ring_flash_attn.py`` and ``update_out_and_lse``), with any kernel of ours in the place of
flash-attn. A rank holds two chunks of c tokens each; what arrives at step s are the keys of rank r - s:

==========  ================================  ===========================
step        queries                           keys
==========  ================================  ===========================
0           both chunks                       its own, causal
1 .. r      both chunks                       the first chunk
r+1 .. N-1  the second chunk                  both chunks
==========  ================================  ===========================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lightning_cp.kernels.api import QKV, Merged, Scores
from lightning_cp.kernels.call_per_tile import CallPerTile, Gradients
from lightning_cp.layout import ALL_ROWS, Tile

Keys = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Step -> K and V [B, 2c, K, D] that have arrived; or their gradients."""


@dataclass(frozen=True)
class ZigzagCalls:
    """One rank's calls.

    Args:
        kernel: its operator is called once per step.
        scores: the scale; causal.
        rank: of the ring.
        ranks: in the ring.
    """

    kernel: CallPerTile
    scores: Scores
    rank: int
    ranks: int

    def tiles(self, tokens: int) -> list[Tile]:
        """What each step computes, in places of the local queries and of the keys that have arrived."""
        chunk = tokens // 2
        own = Tile(ALL_ROWS, 0, tokens, 0, tokens, 0, "causal")
        early = Tile(ALL_ROWS, 0, tokens, 0, chunk, 0, "full")
        late = Tile(ALL_ROWS, chunk, chunk, 0, tokens, 0, "full")
        return [own, *(early if step <= self.rank else late for step in range(1, self.ranks))]

    def forward(self, q_BLHD: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` [B, L, H, D] in q's dtype and ``lse`` [B, H, L] in float32."""
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None  # [B, L, H, 1] while it is merged
        for step, tile in enumerate(self.tiles(q_BLHD.shape[1])):
            found, found_lse = self.kernel.attend(
                _slices(tile, q_BLHD, *keys(step)), _at(tile), self.scores
            )
            new, new_lse = found.to(torch.float32), found_lse.transpose(1, 2).unsqueeze(-1)
            if out is None or lse is None:
                out, lse = new, new_lse
            elif tile.q_start == 0:
                out, lse = _merge(out, lse, new, new_lse)
            else:
                part = slice(tile.q_start, None)
                out[:, part], lse[:, part] = _merge(out[:, part], lse[:, part], new, new_lse)
        assert out is not None
        assert lse is not None
        return out.to(q_BLHD.dtype), lse.squeeze(-1).transpose(1, 2)

    def backward(
        self, merged: Merged, q_BLHD: torch.Tensor, keys: Keys, came: Keys
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``dq``, and in float32 ``dk, dv`` of the rank's own keys, which then go round.

        Args:
            merged: of all steps.
            q_BLHD: the rank's queries.
            keys: what arrives.
            came: step -> the gradients of those keys, float32, which have come round and are added to.
        """
        # Version 0.1.8 does not copy what is float32 already, which gives wrong gradients.
        dq, dk, dv = (x.to(torch.float32, copy=True) for x in self._parts(merged, q_BLHD, keys, 0))
        for step, tile in enumerate(self.tiles(q_BLHD.shape[1])[1:], start=1):
            dq_part, *parts = self._parts(merged, q_BLHD, keys, step)
            dq[:, tile.q_start : tile.q_start + tile.q_len] += dq_part
            for total, part in zip(came(step), parts, strict=True):
                total[:, tile.k_start : tile.k_start + tile.k_len] += part
        return dq.to(q_BLHD.dtype), dk, dv

    def _parts(self, merged: Merged, q_BLHD: torch.Tensor, keys: Keys, step: int) -> Gradients:
        """The gradients of one step's slices."""
        tile = self.tiles(q_BLHD.shape[1])[step]
        queries = slice(tile.q_start, tile.q_start + tile.q_len)
        lse = merged.lse[:, :, queries].contiguous()
        known = Merged(merged.dout[:, queries], merged.out[:, queries], lse)
        return self.kernel.differentiate(
            known, _slices(tile, q_BLHD, *keys(step)), _at(tile), self.scores
        )


def _merge(
    out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    merged = out - F.sigmoid(new_lse - lse) * (out - new)
    return merged, lse - F.logsigmoid(lse - new_lse)


def _slices(tile: Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QKV:
    keys = slice(tile.k_start, tile.k_start + tile.k_len)
    return QKV(q[:, tile.q_start : tile.q_start + tile.q_len], k[:, keys], v[:, keys])


def _at(tile: Tile) -> Tile:
    """The tile in places of its own slices."""
    return tile._replace(q_start=0, k_start=0)
