"""The ring: keys travel to the queries, one hop at a time, and their gradients travel home.

At hop h this rank attends to the keys of ring rank ``r - h``. Hop h+1's keys are posted *before* hop
h is computed, so that communication hides behind compute, in forward and in backward; in backward
the gradients of hop h's keys are posted right after they are computed, and arrive during hop h+1.
Only the key ranges that some tile touches travel, straight from their owner. Partial outputs merge
by log-sum-exp; each tile's backward uses the *merged* out and lse, which is exact
(Dao 2022, arXiv 2205.14135, appendix B; Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_cp.attention.keys import KeyGradients, Keys, KeySums, kernel_keys
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.sinks import Attended, finish
from lightning_cp.comm.ring import Transfer, start_transfer
from lightning_cp.kernels.api import QKV, Merged, accumulate_dtype
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.sums import GradientSum, GradientSums
from lightning_cp.layout.tiles import Hop, Tile, num_keys
from lightning_cp.mesh import Axis
from lightning_cp.named_ranges import named


def ring_forward(q_TBHD: torch.Tensor, keys: Keys, plan: AttentionPlan) -> Attended:
    """Attention of this rank's queries [T, B, h, D] over the whole sequence."""
    q_BLHD = q_TBHD.transpose(0, 1)
    state = Accumulator(q_BLHD, accumulate_dtype(q_TBHD.dtype), keys.value_dim)
    travel = _KeyTravel(keys, plan)
    for hop in plan.hops:
        if hop.tiles:
            state.widen()  # before memory is taken for the next keys
        _attend(q_BLHD, *travel.arrive(hop), hop, state, plan)
    attended = finish(state, q_TBHD.dtype, plan.own_sinks, max_logits=plan.scores.max_logits)
    return attended._replace(out=attended.out.transpose(0, 1))


def _attend(
    q_BLHD: torch.Tensor,
    keys: Keys,
    tiles: tuple[Tile, ...],
    hop: Hop,
    state: Accumulator,
    plan: AttentionPlan,
) -> None:
    """Merge one hop's share. The hop's keys are not referred to longer than this takes."""
    if tiles:
        (heads,) = plan.blocks()
        k, v = kernel_keys(keys, heads.kv_of_q)
        with named("hop {} compute", hop.index):
            plan.kernel.forward(QKV(q_BLHD, k, v), tiles, plan.scores, state)


def ring_backward(
    dout_TBHD: torch.Tensor,
    q_TBHD: torch.Tensor,
    keys: Keys,
    out_TBHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's queries and of its own keys and values.

    Returns:
        ``dq``, ``dk`` and ``dv`` like q, k and v; in the accumulation dtype, or in that of the
        kernel's results where nothing had to be added to them.
    """
    merged = Merged(dout_TBHD.transpose(0, 1), out_TBHD.transpose(0, 1), lse_BHT)
    q_BLHD = q_TBHD.transpose(0, 1)
    dq = GradientSum(q_BLHD, accumulate_dtype(q_TBHD.dtype))
    travel, (own, *hops) = _KeyTravel(keys, plan), plan.hops
    home = _GradientTravel(_differentiate(merged, q_BLHD, travel.arrive(own), own, dq, plan), plan)
    for hop in hops:
        if hop.tiles:
            dq.widen()
        home.leave(hop, _differentiate(merged, q_BLHD, travel.arrive(hop), hop, dq, plan))
    dk, dv = home.finish().both
    return dq.result.transpose(0, 1), dk.result.transpose(0, 1), dv.result.transpose(0, 1)


def _differentiate(
    merged: Merged,
    q_BLHD: torch.Tensor,
    arrived: tuple[Keys, tuple[Tile, ...]],
    hop: Hop,
    dq: GradientSum,
    plan: AttentionPlan,
) -> KeySums:
    """Add one hop's share to ``dq``; the gradients of its keys."""
    keys, tiles = arrived
    (heads,) = plan.blocks()
    if not tiles:
        return KeySums(keys, dq.dtype, leave=hop.index > 0)
    found = KeyGradients(keys, heads.kv_of_q, dq.dtype, leave=hop.index > 0)
    with found as (k, v, dk, dv), named("hop {} compute", hop.index):
        gradients = GradientSums(dq, dk, dv)
        plan.kernel.backward(merged, QKV(q_BLHD, k, v), tiles, plan.scores, gradients)
    return found.sums


class _KeyTravel:
    """Keys on their way: posts the next hop whenever one arrives."""

    def __init__(self, keys: Keys, plan: AttentionPlan) -> None:
        self._own = keys
        self._plan = plan
        self._pending: Transfer | None = None

    def arrive(self, hop: Hop) -> tuple[Keys, tuple[Tile, ...]]:
        """Keys of ``hop`` with the tiles that index them; the next hop is posted first."""
        arrived: torch.Tensor | None = None
        if self._pending is not None:
            with named("hop {} keys wait", hop.index):
                arrived = self._pending.wait()
        hops = self._plan.hops
        self._pending = self._post(hops[hop.index + 1]) if hop.index + 1 < len(hops) else None
        if hop.index == 0:
            return self._own, hop.tiles
        keys = self._own if arrived is None else replace(self._own, tensors=(arrived,))
        return keys, hop.packed_tiles

    def _post(self, hop: Hop) -> Transfer:
        shape = (num_keys(hop.recv), *self._own.pair_shape[1:]) if hop.recv else None
        group = self._plan.mesh.group(Axis.RING)
        with named("copies"):
            sent = self._own.message(hop.send) if hop.send else None
        with named("hop {} keys post", hop.index):
            return start_transfer(sent, hop.dest, shape, hop.source, self._own.tensors[0], group)


class _GradientTravel:
    """Gradients of other ranks' keys on their way home, and of ours coming in."""

    def __init__(self, own: KeySums, plan: AttentionPlan) -> None:
        self._own = own
        self._like = own.nothing()
        self._plan = plan
        self._pending: tuple[Transfer, Hop] | None = None

    def leave(self, hop: Hop, gradients: KeySums) -> None:
        """Send the gradients of hop's keys to their owner; take in those of the hop before."""
        self.finish()
        shape = (num_keys(hop.send), *gradients.shape_of_key) if hop.send else None
        with named("copies"):
            sent = gradients.message() if hop.recv else None
        to = (shape, hop.dest, self._like, self._plan.mesh.group(Axis.RING))
        with named("hop {} gradients post", hop.index):
            transfer = start_transfer(sent, hop.source, *to)
        self._pending = (transfer, hop)

    def finish(self) -> KeySums:
        """Add what came in to our own keys' gradients, which these are."""
        if self._pending is None:
            return self._own
        transfer, hop = self._pending
        self._pending = None
        with named("hop {} gradients wait", hop.index):
            received = transfer.wait()
        if received is not None:
            with named("copies"):
                self._take_in(received, hop)
        return self._own

    def _take_in(self, received: torch.Tensor, hop: Hop) -> None:
        sizes = [end - start for start, end in hop.send]
        for (start, _), part in zip(hop.send, received.split(sizes), strict=True):
            self._own.add(start, part)
