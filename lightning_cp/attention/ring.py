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

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.sinks import Attended, finish
from lightning_cp.attention.ulysses import unpair
from lightning_cp.comm.ring import Transfer, start_transfer
from lightning_cp.kernels.api import accumulate_dtype
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.layout.tiles import Hop, Ranges, Tile, num_keys
from lightning_cp.mesh import Axis


def ring_forward(q_TBHD: torch.Tensor, kv_TBKD: torch.Tensor, plan: AttentionPlan) -> Attended:
    """Attention of this rank's queries [T, B, h, D] over the whole sequence."""
    q_BLHD = q_TBHD.transpose(0, 1)
    state = Accumulator(q_BLHD, accumulate_dtype(q_TBHD.dtype))
    travel = _KeyTravel(kv_TBKD, plan)
    for hop in plan.schedule.hops:
        kv, tiles = travel.arrive(hop)
        if tiles:
            k, v = _local_heads(kv, plan)
            plan.kernel.forward(q_BLHD, k, v, tiles, plan.scores, state)
    attended = finish(state, q_TBHD.dtype, plan.own_sinks, max_logits=plan.scores.max_logits)
    return attended._replace(out=attended.out.transpose(0, 1))


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
    dq_BLHD = torch.zeros_like(q_TBHD.transpose(0, 1), dtype=dtype)
    dkv = torch.zeros_like(kv_TBKD, dtype=dtype, memory_format=torch.contiguous_format)
    travel = _KeyTravel(kv_TBKD, plan)
    home = _GradientTravel(dkv, plan)
    for hop in plan.schedule.hops:
        kv, tiles = travel.arrive(hop)
        into = dkv if hop.index == 0 else dkv.new_zeros(num_keys(hop.recv), *dkv.shape[1:])
        if tiles:
            with _Gradients(kv, into, plan) as (k, v, dk, dv):
                plan.kernel.backward(
                    dout_TBHD.transpose(0, 1),
                    q_TBHD.transpose(0, 1),
                    k,
                    v,
                    out_TBHD.transpose(0, 1),
                    lse_BHT,
                    tiles,
                    plan.scores,
                    dq_BLHD,
                    dk,
                    dv,
                )
        home.leave(hop, into)
    home.finish()
    return dq_BLHD.transpose(0, 1), dkv


class _KeyTravel:
    """Keys on their way: posts the next hop whenever one arrives."""

    def __init__(self, kv_TBKD: torch.Tensor, plan: AttentionPlan) -> None:
        hops = plan.schedule.hops
        # Token-first and contiguous: a range of keys is sent as it lies in memory.
        self._kv = kv_TBKD.contiguous() if len(hops) > 1 else kv_TBKD
        self._plan = plan
        self._pending: Transfer | None = None

    def arrive(self, hop: Hop) -> tuple[torch.Tensor, tuple[Tile, ...]]:
        """Keys of ``hop`` with the tiles that index them; the next hop is posted first."""
        arrived = self._pending.wait() if self._pending is not None else None
        hops = self._plan.schedule.hops
        self._pending = self._post(hops[hop.index + 1]) if hop.index + 1 < len(hops) else None
        if hop.index == 0:
            return self._kv, hop.tiles
        return (self._kv if arrived is None else arrived), hop.packed_tiles

    def _post(self, hop: Hop) -> Transfer:
        shape = (num_keys(hop.recv), *self._kv.shape[1:]) if hop.recv else None
        group = self._plan.mesh.group(Axis.RING)
        return start_transfer(
            _take(self._kv, hop.send), hop.dest, shape, hop.source, self._kv, group
        )


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
        received = transfer.wait()
        if received is None:
            return
        sizes = [end - start for start, end in hop.send]
        for (start, end), part in zip(hop.send, received.split(sizes), strict=True):
            self._dkv[start:end] += part


class _Gradients:
    """K, V and gradient buffers of one hop in the kernel's shapes; folds expanded heads back."""

    def __init__(self, kv_TBKD: torch.Tensor, dkv_TBKD: torch.Tensor, plan: AttentionPlan) -> None:
        self._dkv = dkv_TBKD
        self._index = plan.heads.kv_index(plan.ulysses_rank)
        self._keys = _local_heads(kv_TBKD, plan)

    def __enter__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        k, v = self._keys
        if self._index is None:
            dk, dv = (x.transpose(0, 1) for x in unpair(self._dkv))
        else:
            dk, dv = (torch.zeros_like(x, dtype=self._dkv.dtype) for x in (k, v))
        self._expanded = (dk, dv)
        return k, v, dk, dv

    def __exit__(self, kind: object, *_: object) -> None:
        if self._index is None or kind is not None:
            return
        index = torch.tensor(self._index, device=self._dkv.device)
        for target, expanded in zip(unpair(self._dkv), self._expanded, strict=True):
            target.index_add_(2, index, expanded.transpose(0, 1))


def _local_heads(kv_TBKD: torch.Tensor, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [B, keys, heads, D]; expanded to query heads where those straddle groups."""
    k, v = (x.transpose(0, 1) for x in unpair(kv_TBKD))
    index = plan.heads.kv_index(plan.ulysses_rank)
    if index is None:
        return k, v
    chosen = torch.tensor(index, device=kv_TBKD.device)
    return k.index_select(2, chosen), v.index_select(2, chosen)


def _take(kv_TBKD: torch.Tensor, ranges: Ranges) -> torch.Tensor | None:
    """The keys of some ranges, laid end to end; no copy for a single range."""
    if not ranges:
        return None
    if len(ranges) == 1:
        start, end = ranges[0]
        return kv_TBKD[start:end]
    return torch.cat([kv_TBKD[start:end] for start, end in ranges])
