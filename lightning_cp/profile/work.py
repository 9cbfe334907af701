"""What the schedule says of a step's attention calls: tiles, visible pairs, and bytes sent."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from lightning_cp.attention.keep import current_stash
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.kernels.api import accumulate_dtype
from lightning_cp.layout.traffic import Traffic, attention_traffic


class ScheduledWork:
    """Counts the calls of a step, recomputations included, and those that backward comes through."""

    def __init__(self) -> None:
        self.calls = self.backward_calls = self.tiles = self.pairs = 0
        self.sent = Traffic()

    def note(self, plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor) -> None:
        """A call with these queries was made; follow it to its backward."""
        forward, backward = _traffic(plan, q_BLHD, out_BLHD)
        stash, pairs = current_stash(), _pairs(plan, q_BLHD)
        self.calls += 1
        if (
            stash is not None
        ):  # exchanged once more in backward; and not at all where it is replayed
            backward += _over_ulysses(forward)
        if stash is None or not stash.replaying:
            self.sent += forward
            self.pairs += pairs
            self.tiles += _tiles(plan, plan.exchange.forward)

        def passed(_: torch.Tensor) -> None:
            self.backward_calls += 1
            self.sent += backward
            self.pairs += pairs
            self.tiles += _tiles(plan, plan.exchange.backward)

        if out_BLHD.requires_grad:
            out_BLHD.register_hook(passed)

    def shown(self) -> dict[str, object]:
        """As it is written."""
        return {
            "attention_calls": self.calls,
            "attention_calls_backward": self.backward_calls,
            "tiles": self.tiles,
            "visible_pairs": self.pairs,
            "sent": {**asdict(self.sent), "total_bytes": self.sent.total_bytes},
        }


def _traffic(
    plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor
) -> tuple[Traffic, Traffic]:
    batch, _, _, dim = q_BLHD.shape
    return attention_traffic(
        plan.schedule,
        plan.heads,
        plan.mesh.cp_rank,
        batch=batch,
        head_dim=dim,
        value_dim=out_BLHD.shape[3],
        itemsize=q_BLHD.dtype.itemsize,
        accumulate_itemsize=accumulate_dtype(q_BLHD.dtype).itemsize,
        exchange=plan.exchange.name,
        kv_heads_per_gather=plan.exchange.kv_heads_per_gather,
    )


def _over_ulysses(forward: Traffic) -> Traffic:
    """Of a forward: what backward repeats of it if its inputs were kept instead of what was exchanged."""
    return replace(forward, p2p_messages=0, p2p_bytes=0, all_gather_calls=0, all_gather_bytes=0)


def _pairs(plan: AttentionPlan, q_BLHD: torch.Tensor) -> int:
    """Visible (query, key) pairs of this rank; where rows are alike, the schedule has one of them."""
    rows = q_BLHD.shape[0] if plan.schedule.documents.num_rows == 1 else 1
    return rows * plan.schedule.work[plan.mesh.ring_rank]


def _tiles(plan: AttentionPlan, execution: str) -> int:
    """Of one pass of one call on this rank."""
    if plan.exchange.name == "ring":
        return sum(len(hop.tiles) for hop in plan.hops)
    calls = sum(len(call.tiles) for call in plan.gathered.calls(execution))
    return calls * len(plan.blocks(plan.exchange.kv_heads_per_gather))
