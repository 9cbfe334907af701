"""The ring: keys travel to the queries, one hop at a time, and their gradients travel home.

At hop h this rank attends to the keys of ring rank ``r - h``. Hop h+1's keys are posted *before* hop
h is computed, so that communication hides behind compute, in forward and in backward; in backward
the gradients of hop h's keys are posted right after they are computed, and arrive during hop h+1.
Only the key ranges that some tile touches travel, straight from their owner. Partial outputs merge
by log-sum-exp; each tile's backward uses the *merged* out and lse, which is exact
(Dao 2022, arXiv 2205.14135, appendix B; Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

import torch

from lightning_cp.attention.keys import KeyGradients, kernel_keys, take
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.sinks import Attended, finish
from lightning_cp.comm.ring import Transfer, start_transfer
from lightning_cp.kernels.api import QKV, Merged, accumulate_dtype
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.sums import GradientSum, GradientSums
from lightning_cp.layout.tiles import Hop, Tile, num_keys
from lightning_cp.mesh import Axis
from lightning_cp.named_ranges import named


def ring_forward(q_TBHD: torch.Tensor, kv_TBKD: torch.Tensor, plan: AttentionPlan) -> Attended:
    """Attention of this rank's queries [T, B, h, D] over the whole sequence."""
    q_BLHD = q_TBHD.transpose(0, 1)
    state = Accumulator(q_BLHD, accumulate_dtype(q_TBHD.dtype))
    travel = _KeyTravel(kv_TBKD, plan)
    for hop in plan.hops:
        _attend(q_BLHD, *travel.arrive(hop), hop, state, plan)
    attended = finish(state, q_TBHD.dtype, plan.own_sinks, max_logits=plan.scores.max_logits)
    return attended._replace(out=attended.out.transpose(0, 1))


def _attend(
    q_BLHD: torch.Tensor,
    kv_TBKD: torch.Tensor,
    tiles: tuple[Tile, ...],
    hop: Hop,
    state: Accumulator,
    plan: AttentionPlan,
) -> None:
    """Merge one hop's share. The hop's keys are not referred to longer than this takes."""
    if tiles:
        (heads,) = plan.blocks()
        k, v = kernel_keys(kv_TBKD, heads.kv_of_q)
        with named("hop {} compute", hop.index):
            plan.kernel.forward(QKV(q_BLHD, k, v), tiles, plan.scores, state)


def ring_backward(
    dout_TBHD: torch.Tensor,
    q_TBHD: torch.Tensor,
    kv_TBKD: torch.Tensor,
    out_TBHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of this rank's queries and of its own keys and values.

    Returns:
        ``dq`` [T, B, h, D] and the pair ``dkv`` [T, B, 2k, D], both in the accumulation dtype.
    """
    dtype = accumulate_dtype(q_TBHD.dtype)
    merged = Merged(dout_TBHD.transpose(0, 1), out_TBHD.transpose(0, 1), lse_BHT)
    q_BLHD = q_TBHD.transpose(0, 1)
    dq_TBHD = q_TBHD.new_empty(q_TBHD.shape, dtype=dtype)
    dq = GradientSum(dq_TBHD.transpose(0, 1), empty=True)
    dkv = kv_TBKD.new_empty(kv_TBKD.shape, dtype=dtype)
    travel, home = _KeyTravel(kv_TBKD, plan), _GradientTravel(dkv, plan)
    for hop in plan.hops:
        into = dkv if hop.index == 0 else dkv.new_empty(num_keys(hop.recv), *dkv.shape[1:])
        _differentiate(merged, q_BLHD, *travel.arrive(hop), hop, dq, into, plan)
        home.leave(hop, into)
        del into
    home.finish()
    return dq.total.transpose(0, 1), dkv


def _differentiate(
    merged: Merged,
    q_BLHD: torch.Tensor,
    kv_TBKD: torch.Tensor,
    tiles: tuple[Tile, ...],
    hop: Hop,
    dq: GradientSum,
    dkv_TBKD: torch.Tensor,
    plan: AttentionPlan,
) -> None:
    """Add one hop's share to ``dq``, and write that of its keys to ``dkv``, which holds nothing before."""
    if not tiles:
        dkv_TBKD.zero_()
        return
    (heads,) = plan.blocks()
    with (
        KeyGradients(kv_TBKD, dkv_TBKD, heads.kv_of_q, empty=True) as (k, v, dk, dv),
        named("hop {} compute", hop.index),
    ):
        gradients = GradientSums(dq, dk, dv)
        plan.kernel.backward(merged, QKV(q_BLHD, k, v), tiles, plan.scores, gradients)


class _KeyTravel:
    """Keys on their way: posts the next hop whenever one arrives."""

    def __init__(self, kv_TBKD: torch.Tensor, plan: AttentionPlan) -> None:
        hops = plan.hops
        # Token-first and contiguous: a range of keys is sent as it lies in memory.
        self._kv = kv_TBKD.contiguous() if len(hops) > 1 else kv_TBKD
        self._plan = plan
        self._pending: Transfer | None = None

    def arrive(self, hop: Hop) -> tuple[torch.Tensor, tuple[Tile, ...]]:
        """Keys of ``hop`` with the tiles that index them; the next hop is posted first."""
        arrived: torch.Tensor | None = None
        if self._pending is not None:
            with named("hop {} keys wait", hop.index):
                arrived = self._pending.wait()
        hops = self._plan.hops
        self._pending = self._post(hops[hop.index + 1]) if hop.index + 1 < len(hops) else None
        if hop.index == 0:
            return self._kv, hop.tiles
        return (self._kv if arrived is None else arrived), hop.packed_tiles

    def _post(self, hop: Hop) -> Transfer:
        shape = (num_keys(hop.recv), *self._kv.shape[1:]) if hop.recv else None
        group = self._plan.mesh.group(Axis.RING)
        with named("hop {} keys post", hop.index):
            sent = take(self._kv, hop.send) if hop.send else None
            return start_transfer(sent, hop.dest, shape, hop.source, self._kv, group)


class _GradientTravel:
    """Gradients of other ranks' keys on their way home, and of ours coming in."""

    def __init__(self, dkv_TBKD: torch.Tensor, plan: AttentionPlan) -> None:
        self._dkv = dkv_TBKD
        self._plan = plan
        self._pending: tuple[Transfer, Hop] | None = None

    def leave(self, hop: Hop, gradients: torch.Tensor) -> None:
        """Send ``gradients`` of hop's keys to their owner; take in those of the hop before."""
        self.finish()
        if hop.index == 0:
            return
        shape = (num_keys(hop.send), *self._dkv.shape[1:]) if hop.send else None
        with named("hop {} gradients post", hop.index):
            transfer = start_transfer(
                gradients if hop.recv else None,
                hop.source,
                shape,
                hop.dest,
                self._dkv,
                self._plan.mesh.group(Axis.RING),
            )
        self._pending = (transfer, hop)

    def finish(self) -> None:
        """Add what came in to our own keys' gradients."""
        if self._pending is None:
            return
        transfer, hop = self._pending
        self._pending = None
        with named("hop {} gradients wait", hop.index):
            received = transfer.wait()
        if received is None:
            return
        sizes = [end - start for start, end in hop.send]
        for (start, end), part in zip(hop.send, received.split(sizes), strict=True):
            self._dkv[start:end] += part
