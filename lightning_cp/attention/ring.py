"""Ring attention: keys travel to the queries, one hop at a time, and their gradients travel home.

At hop h this rank attends to the keys of ring rank ``r - h``. Hop h+1's keys are posted *before* hop
h is computed, so that communication hides behind compute, in forward and in backward; in backward
the gradients of hop h's keys are posted right after they are computed, and arrive during hop h+1.
Only the key ranges that some tile touches travel, directly from their owner. In a *rotation* all keys
travel, from each rank to the next one, followed by the sum of their gradients: of a node, only one rank
sends to another node, which suits few network cards. Partial outputs merge by log-sum-exp; each
tile's backward uses the *merged* out and lse, which is exact (Dao 2022, arXiv 2205.14135, appendix B;
Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_cp.attention.keys import KeyGradients, KeyGradientSums, Keys, kernel_keys
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.sinks import AttentionResult, finish_attention
from lightning_cp.comm.transfer import Transfer, start_transfer
from lightning_cp.kernels.merge import Accumulator, GradientSum, GradientSums
from lightning_cp.kernels.protocol import QKV, Output, accumulate_dtype
from lightning_cp.layout.axes import Axis
from lightning_cp.layout.tiles import Hop, Ranges, Tile
from lightning_cp.utils.tracing import profile_range


def ring_forward(q_TBHD: torch.Tensor, keys: Keys, plan: AttentionPlan) -> AttentionResult:
    """Compute attention of this rank's queries [T, B, h, D] over the whole sequence."""
    q_BLHD = q_TBHD.transpose(0, 1)
    single = plan.own_sinks is None and len([hop for hop in plan.hops if hop.tiles]) == 1
    state = Accumulator(q_BLHD, accumulate_dtype(q_TBHD.dtype), keys.value_dim, single=single)
    exchange = _KeyExchange(keys, plan)
    for hop in plan.hops:
        if hop.tiles:
            state.widen()  # before memory is allocated for the next keys
        _attend(q_BLHD, *exchange.receive(hop), hop, state, plan)
    attended = finish_attention(
        state, q_TBHD.dtype, plan.own_sinks, max_logits=plan.scores.max_logits
    )
    return attended._replace(out=attended.out.transpose(0, 1))


def _attend(
    q_BLHD: torch.Tensor,
    keys: Keys,
    tiles: tuple[Tile, ...],
    hop: Hop,
    state: Accumulator,
    plan: AttentionPlan,
) -> None:
    """Merge one hop's share; references to the hop's keys end with this call."""
    if tiles:
        k, v = kernel_keys(keys, plan.block.kv_of_q)
        with profile_range("hop {} compute", hop.index):
            plan.kernel.forward(QKV(q_BLHD, k, v), tiles, plan.scores, state)


def ring_backward(
    dout_TBHD: torch.Tensor,
    q_TBHD: torch.Tensor,
    keys: Keys,
    out_TBHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute gradients of this rank's queries, keys and values.

    Returns:
        ``dq``, ``dk`` and ``dv`` like q, k and v; in the accumulation dtype, or in that of the
        kernel's result if it is the only part.
    """
    merged = Output(dout_TBHD.transpose(0, 1), out_TBHD.transpose(0, 1), lse_BHT)
    q_BLHD = q_TBHD.transpose(0, 1)
    dq = GradientSum(q_BLHD, accumulate_dtype(q_TBHD.dtype))
    exchange, (own, *hops) = _KeyExchange(keys, plan), plan.hops
    ours = _differentiate(merged, q_BLHD, exchange.receive(own), own, dq, plan)
    is_narrow = plan.exchange.key_gradients == "compute"
    returning = _GradientExchange(ours, plan, q_TBHD.dtype if is_narrow else dq.dtype)
    for hop in hops:
        if hop.tiles:
            dq.widen()
        returning.send(hop, _differentiate(merged, q_BLHD, exchange.receive(hop), hop, dq, plan))
    dk, dv = returning.finish().both
    return dq.result.transpose(0, 1), dk.result.transpose(0, 1), dv.result.transpose(0, 1)


def _differentiate(
    merged: Output,
    q_BLHD: torch.Tensor,
    arrived: tuple[Keys, tuple[Tile, ...]],
    hop: Hop,
    dq: GradientSum,
    plan: AttentionPlan,
) -> KeyGradientSums:
    """Add one hop's share to ``dq``, and return the gradients of its keys."""
    keys, tiles = arrived
    if not tiles:
        return KeyGradientSums(keys, dq.dtype, leave=hop.index > 0)
    gradients = KeyGradients(keys, plan.block.kv_of_q, dq.dtype, leave=hop.index > 0)
    with gradients as (k, v, dk, dv), profile_range("hop {} compute", hop.index):
        sums = GradientSums(dq, dk, dv)
        plan.kernel.backward(merged, QKV(q_BLHD, k, v), tiles, plan.scores, sums)
    return gradients.sums


class _KeyExchange:
    """Transfers of keys: posts the next hop whenever one arrives."""

    def __init__(self, keys: Keys, plan: AttentionPlan) -> None:
        self._own = keys
        self._plan = plan
        self._pending: Transfer | None = None
        self._message: tuple[Ranges, torch.Tensor] | None = None
        """Own keys of the last message, which the next hop sends again if it needs the same ones."""

    def receive(self, hop: Hop) -> tuple[Keys, tuple[Tile, ...]]:
        """Return the keys of ``hop`` with the tiles that index them; posts the next hop first."""
        arrived: torch.Tensor | None = None
        if self._pending is not None:
            with profile_range("hop {} keys wait", hop.index):
                arrived = self._pending.wait()
        keys = self._own if arrived is None else replace(self._own, tensors=(arrived,))
        hops = self._plan.hops
        sent = keys if self._plan.rotates else self._own
        self._pending = self._post(hops[hop.index + 1], sent) if hop.index + 1 < len(hops) else None
        return keys, hop.packed_tiles if hop.index else hop.tiles

    def _post(self, hop: Hop, keys: Keys) -> Transfer:
        shape = (hop.num_received, *self._own.pair_shape[1:]) if hop.recv else None
        group = self._plan.mesh.group(Axis.RING)
        with profile_range("copies"):
            sent = self._pack(keys, hop.send) if hop.send else None
        if hop.index + 1 == len(self._plan.hops):
            self._message = None
        with profile_range("hop {} keys post", hop.index):
            return start_transfer(sent, hop.dest, shape, hop.source, self._own.tensors[0], group)

    def _pack(self, keys: Keys, ranges: Ranges) -> torch.Tensor:
        if self._plan.rotates:  # other keys at every hop
            return keys.message(ranges)
        if self._message is None or self._message[0] != ranges:
            self._message = None  # freed before the next one is made
            self._message = (ranges, keys.message(ranges))
        return self._message[1]


class _GradientExchange:
    """Transfers of the gradients of other ranks' keys home, and of this rank's keys here.

    In a rotation what arrives belongs to the keys of the next hop, and travels on with their gradients; at
    the end it belongs to this rank's keys.

    Args:
        own: sums of the gradients of this rank's keys.
        plan: of the call.
        dtype: of the messages.
    """

    def __init__(self, own: KeyGradientSums, plan: AttentionPlan, dtype: torch.dtype) -> None:
        self._own = own
        self._like = own.empty().to(dtype)
        self._plan = plan
        self._pending: tuple[Transfer, Hop] | None = None

    def send(self, hop: Hop, gradients: KeyGradientSums) -> None:
        """Send the gradients of hop's keys on; add those received for the previous hop."""
        if self._plan.rotates:
            gradients.message()  # before others' sums are added: they are as wide
        self._receive(gradients if self._plan.rotates else self._own)
        to, source = (hop.dest, hop.source) if self._plan.rotates else (hop.source, hop.dest)
        shape = (hop.num_sent, *gradients.shape_of_key) if hop.send else None
        with profile_range("copies"):
            sent = gradients.message().to(self._like.dtype) if hop.recv else None
        back = (shape, source, self._like, self._plan.mesh.group(Axis.RING))
        with profile_range("hop {} gradients post", hop.index):
            transfer = start_transfer(sent, to, *back)
        self._pending = (transfer, hop)

    def finish(self) -> KeyGradientSums:
        """Return the gradients of this rank's keys."""
        self._receive(self._own)
        return self._own

    def _receive(self, gradients: KeyGradientSums) -> None:
        """Add what was received, if anything was."""
        if self._pending is None:
            return
        transfer, hop = self._pending
        self._pending = None
        with profile_range("hop {} gradients wait", hop.index):
            received = transfer.wait()
        if received is not None:
            with profile_range("copies"):
                sizes = [end - start for start, end in hop.send]
                parts = received.split_with_sizes(sizes)
                for (start, _), part in zip(hop.send, parts, strict=True):
                    gradients.add(start, part)
